"""What commands read of instants and intervals: the driver's values where it has one, else the nearest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from rota.db import saturating
from rota.db.saturating import EARLIEST, LATEST, LONGEST, decode_interval, saturate

if TYPE_CHECKING:
    from asyncpg import Connection, Record

NOW = datetime(2026, 7, 1, 12, 30, 15, 123456, tzinfo=UTC)
EXTREMES = {
    "infinity": LATEST, "-infinity": EARLIEST, "20000-01-01 00:00+00": LATEST, "4000-01-01 00:00+00 BC": EARLIEST,
    "294276-12-31 00:00+00": LATEST,
}  # fmt: skip


@pytest.mark.parametrize("instant", [NOW, NOW - timedelta(days=36525), NOW + timedelta(days=36525)])
def test_instants_come_back_as_they_were(instant: datetime) -> None:
    """Also before 2000, from which PostgreSQL counts."""
    assert saturating.decode_instant(saturating.encode_instant(instant)) == instant


@pytest.mark.parametrize("length", [timedelta(0), timedelta(days=-1, microseconds=1), timedelta(days=366, seconds=7)])
def test_lengths_come_back_as_they_were(length: timedelta) -> None:
    """In both directions."""
    assert decode_interval(saturating.encode_interval(length)) == length


async def test_a_connection_reads_what_the_driver_can_not(conn: Connection[Record]) -> None:
    """And all else as before, infinity as a parameter included."""
    plain = (
        "select now(), interval '1 year 2 months -3 days 4 hours', interval '-14 months', "
        "array[timestamptz '1999-01-01 00:00+00']"
    )
    before = await conn.fetchrow(plain)
    await saturate(conn)
    after = await conn.fetchrow(plain)
    assert before is not None
    assert after is not None
    assert tuple(before)[1:] == tuple(after)[1:]
    for text, instant in EXTREMES.items():
        assert await conn.fetchval("select $1::text::timestamptz", text) == instant
    for text in ("178956970 years", "2147483647 days"):
        assert await conn.fetchval("select $1::text::interval", text) == LONGEST
    assert await conn.fetchval("select $1::timestamptz = '-infinity'", datetime.min.replace(tzinfo=UTC))
