"""COPY into rota.jobs on a connection of the caller's: in its transaction, all rows or none, sent while they are being made.

Only asyncpg's and psycopg's own connections can: whoever has another one inserts by statements (`drivers`).
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rota.db.drivers import is_of, refusal, server_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    import psycopg

    Batches = Iterable[tuple[int, Iterable[bytes]]]
    """For each COPY the number of its first row, and its rows in the text format, in pieces as large as one likes."""

SAVEPOINT = ("savepoint rota_many", "release savepoint rota_many", "rollback to savepoint rota_many")
"""Where the caller has a transaction open, an error takes back our rows and leaves that usable."""

TRANSACTION = ("begin", "commit", "rollback")

_LINE = re.compile(r"COPY jobs, \S+ (\d+)")


def can_copy(conn: Any) -> bool:
    """Say whether this is a connection of asyncpg or psycopg itself, and, with psycopg, not in pipeline mode."""
    if is_of(conn, "psycopg", {"Connection", "AsyncConnection"}):
        return not conn.pgconn.pipeline_status
    return is_of(conn, "asyncpg", {"Connection", "PoolConnectionProxy"})


async def copy_jobs(conn: Any, columns: Sequence[str], batches: Batches) -> None:
    """Insert the rows of all batches, or none. Raises Refused, naming the row, for what the database says no to.

    What fetching a batch raises leaves as it is. An error inside of a batch must wait until the next one is fetched: drivers
    send the server the text of what ends a COPY.
    """
    of_asyncpg = is_of(conn, "asyncpg", {"Connection", "PoolConnectionProxy"})
    async with _whole(conn, inside=conn.is_in_transaction() if of_asyncpg else _inside(conn)):
        for first, pieces in batches:
            with _naming_rows(first):
                if of_asyncpg:
                    await conn.copy_to_table("jobs", schema_name="rota", columns=columns, source=_later(pieces))
                else:
                    await _copy_psycopg_async(conn, columns, pieces)


def copy_jobs_sync(conn: Any, columns: Sequence[str], batches: Batches) -> None:
    """Do the same on a blocking connection."""
    with _whole_sync(conn, inside=_inside(conn)):
        for first, pieces in batches:
            with _naming_rows(first), conn.cursor() as cursor, cursor.copy(_copy(columns)) as copy:
                for piece in pieces:
                    copy.write(piece)


async def _later(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)  # uvloop sends nothing before its turn ends, and others want theirs


async def _copy_psycopg_async(
    conn: psycopg.AsyncConnection[Any], columns: Sequence[str], pieces: Iterable[bytes]
) -> None:
    async with conn.cursor() as cursor, cursor.copy(_copy(columns)) as copy:
        for piece in pieces:
            await copy.write(piece)


def _copy(columns: Sequence[str]) -> psycopg.sql.Composed:
    from psycopg import sql  # noqa: PLC0415  whoever holds a connection has it

    return sql.SQL("copy rota.jobs ({}) from stdin").format(sql.SQL(", ").join(map(sql.Identifier, columns)))


def _inside(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Say whether a transaction is open, or opens by itself: its end is the caller's then."""
    return not conn.autocommit or bool(conn.info.transaction_status)  # 0 is idle


@asynccontextmanager
async def _whole(conn: Any, *, inside: bool) -> AsyncIterator[None]:
    # Not the drivers' own transaction(): asyncpg's refuses one that was begun by a statement, and psycopg's commits one
    # that was about to begin by itself.
    begin, keep, undo = SAVEPOINT if inside else TRANSACTION
    done = False
    try:
        await conn.execute(begin)  # who is cancelled here can't know whether it has begun
        yield
        done = True
    finally:
        if not done:
            with suppress(Exception):  # a broken connection: the first error says so
                await conn.execute(undo)
    await conn.execute(keep)


@contextmanager
def _whole_sync(conn: psycopg.Connection[Any], *, inside: bool) -> Iterator[None]:
    begin, keep, undo = SAVEPOINT if inside else TRANSACTION
    done = False
    try:
        conn.execute(begin)
        yield
        done = True
    finally:
        if not done:
            with suppress(Exception):
                conn.execute(undo)
    conn.execute(keep)


@contextmanager
def _naming_rows(first: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (said := server_error(error)) is None:
            raise
        # The rest of the context repeats the row.
        context = getattr(error, "context", None) or getattr(getattr(error, "diag", None), "context", None) or ""
        row = _LINE.search(context)
        where = f"payloads[{first + int(row[1]) - 1}]: " if row else ""
        if (refused := refusal(*said, where=where)) is None:
            raise
        raise refused from None
