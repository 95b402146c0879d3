"""Classification of database errors, and isolation of bad rows in a batch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest
from asyncpg.exceptions import InternalClientError
from hypothesis import given
from hypothesis import strategies as st

from rota.db.pool import ConnectionLost
from rota.db.salvage import Fault, fault_of, salvage

if TYPE_CHECKING:
    from collections.abc import Sequence

TRANSIENT = (
    "08000 08003 08006 08P01 25006 25P03 28000 28P01 3D000 3F000 40001 40P01 42501 42P01 53000 53100 53200 53300 55000 55006 "
    "55P03 57000 57014 57P01 57P02 57P03 57P05 58000 58030"
)
ROW = (
    "09000 0L000 20000 21000 22000 22001 22003 22007 22008 22012 22021 22023 22P02 22P03 22P05 23502 23503 23505 "
    "23514 23P01 27000 38000 39000 44000 54000 54001 P0001 P0004 RT006 XX000 XX001 XX002 ZZ999"
)
FATAL = "0A000 25001 25P02 26000 42601 42703 42704 42804 42883 42P02 42P10 42P17"


@pytest.mark.parametrize(
    ("sqlstate", "fault"),
    [
        (sqlstate, fault)
        for fault, states in ((Fault.TRANSIENT, TRANSIENT), (Fault.ROW, ROW), (Fault.FATAL, FATAL))
        for sqlstate in states.split()
    ],
)
def test_every_sqlstate_has_one_classification(sqlstate: str, fault: Fault) -> None:
    """All batch statements share it."""
    error = asyncpg.PostgresError.new({"S": "ERROR", "C": sqlstate, "M": "refused"})
    assert fault_of(error) is fault


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ConnectionLost("gone"), Fault.TRANSIENT),
        (ConnectionResetError(), Fault.TRANSIENT),
        (TimeoutError(), Fault.TRANSIENT),
        (OverflowError("date value out of range"), Fault.ROW),
        (ValueError("year 10000 is out of range"), Fault.ROW),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), Fault.ROW),
        (asyncpg.InterfaceError("connection is closed"), Fault.FATAL),
        (InternalClientError("got result for unknown protocol state"), Fault.FATAL),
        (KeyError("lane"), Fault.FATAL),
        (MemoryError(), Fault.FATAL),
        (asyncio.CancelledError(), Fault.FATAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_raised_by_the_client_are_classified_too(error: BaseException, fault: Fault) -> None:
    """A value that the driver cannot encode or decode is a row error; a bug is not."""
    assert fault_of(error) is fault


class StatementWithBadRows:
    """A statement that refuses every batch that contains a bad row."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.written: list[int] = []
        self.aside: list[int] = []
        self.calls = 0

    async def write(self, batch: Sequence[int]) -> int:
        self.calls += 1
        if self.bad.intersection(batch):
            raise ValueError
        self.written += batch
        return len(batch)

    async def put_aside(self, row: int, _: Exception) -> int:
        self.aside.append(row)
        return 0


@given(st.integers(0, 200), st.sets(st.integers(0, 199), max_size=5))
async def test_good_rows_are_written_in_order_and_bad_rows_are_put_aside(size: int, bad: set[int]) -> None:
    """Each bad row costs at most two calls per halving."""
    statement = StatementWithBadRows({row for row in bad if row < size})
    results = await salvage(range(size), statement.write, statement.put_aside)
    assert statement.written == [row for row in range(size) if row not in bad]
    assert statement.aside == sorted(statement.bad)
    assert sum(results) == len(statement.written)
    assert statement.calls <= 1 + 2 * len(statement.bad) * max(1, size).bit_length()


@pytest.mark.parametrize("error", [ConnectionLost("gone"), KeyError("bug")])
async def test_errors_that_concern_no_row_propagate_at_the_first_call(error: Exception) -> None:
    """Smaller batches would not help."""
    calls = 0

    async def write(_: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        raise error

    async def put_aside(_row: int, _error: Exception) -> None:
        pytest.fail("no row is at fault")

    with pytest.raises(type(error)):
        await salvage(range(100), write, put_aside)
    assert calls == 1
