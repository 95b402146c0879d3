"""COPY into rota.jobs on the caller's connection and in its transaction: all rows or none, streamed while they are generated.

Works only on connections of asyncpg and psycopg. For other drivers, `drivers` inserts with statements.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rota.db.drivers import is_instance_of, refused_error, server_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    import psycopg

    Batches = Iterable[tuple[int, Iterable[bytes]]]
    """For each COPY: the number of its first row, and its rows in the text format, as chunks of any size."""

SAVEPOINT = ("savepoint rota_many", "release savepoint rota_many", "rollback to savepoint rota_many")
"""In the caller's open transaction, an error rolls back only the copied rows, and the transaction stays usable."""

TRANSACTION = ("begin", "commit", "rollback")

_LINE = re.compile(r"COPY jobs, \S+ (\d+)")


def can_copy(conn: Any) -> bool:
    """Return whether this is a connection of asyncpg, or of psycopg outside of pipeline mode."""
    if is_instance_of(conn, "psycopg", {"Connection", "AsyncConnection"}):
        return not conn.pgconn.pipeline_status
    return is_instance_of(conn, "asyncpg", {"Connection", "PoolConnectionProxy"})


async def copy_jobs(conn: Any, columns: Sequence[str], batches: Batches) -> None:
    """Insert the rows of all batches, or none. Raises Refused, naming the row, if the database rejects a value.

    An exception raised while fetching the next batch propagates unchanged. Do not raise while the pieces of a batch are being
    read: the driver would end the COPY by sending the exception's text to the server. Keep the error and raise it when the next
    batch is requested.
    """
    is_asyncpg = is_instance_of(conn, "asyncpg", {"Connection", "PoolConnectionProxy"})
    in_transaction = conn.is_in_transaction() if is_asyncpg else _in_transaction(conn)
    async with _all_or_nothing(conn, in_transaction=in_transaction):
        for first, pieces in batches:
            with _errors_naming_row(first):
                if is_asyncpg:
                    await conn.copy_to_table("jobs", schema_name="rota", columns=columns, source=_as_async(pieces))
                else:
                    await _copy_psycopg_async(conn, columns, pieces)


def copy_jobs_sync(conn: Any, columns: Sequence[str], batches: Batches) -> None:
    """Do the same on a blocking connection."""
    with _all_or_nothing_sync(conn, in_transaction=_in_transaction(conn)):
        for first, pieces in batches:
            with _errors_naming_row(first), conn.cursor() as cursor, cursor.copy(_copy_statement(columns)) as copy:
                for piece in pieces:
                    copy.write(piece)


async def _as_async(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)  # let the loop run: uvloop writes only then, and other tasks get their turn


async def _copy_psycopg_async(
    conn: psycopg.AsyncConnection[Any], columns: Sequence[str], pieces: Iterable[bytes]
) -> None:
    async with conn.cursor() as cursor, cursor.copy(_copy_statement(columns)) as copy:
        for piece in pieces:
            await copy.write(piece)


def _copy_statement(columns: Sequence[str]) -> psycopg.sql.Composed:
    from psycopg import sql  # noqa: PLC0415  optional, and installed if there is a connection

    return sql.SQL("copy rota.jobs ({}) from stdin").format(sql.SQL(", ").join(map(sql.Identifier, columns)))


def _in_transaction(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether a transaction is open or the next statement opens one. In both cases the caller ends it."""
    return not conn.autocommit or bool(conn.info.transaction_status)  # status 0 is idle


@asynccontextmanager
async def _all_or_nothing(conn: Any, *, in_transaction: bool) -> AsyncIterator[None]:
    # The drivers' transaction() does not fit: asyncpg's fails if the caller ran BEGIN as a statement, and psycopg's would commit a
    # transaction that opened implicitly, which is the caller's to commit.
    begin, commit, rollback = SAVEPOINT if in_transaction else TRANSACTION
    done = False
    try:
        await conn.execute(begin)  # inside the try: if cancelled here, the transaction may or may not be open
        yield
        done = True
    finally:
        if not done:
            with suppress(Exception):  # on a broken connection, the first error is the useful one
                await conn.execute(rollback)
    await conn.execute(commit)


@contextmanager
def _all_or_nothing_sync(conn: psycopg.Connection[Any], *, in_transaction: bool) -> Iterator[None]:
    begin, commit, rollback = SAVEPOINT if in_transaction else TRANSACTION
    done = False
    try:
        conn.execute(begin)
        yield
        done = True
    finally:
        if not done:
            with suppress(Exception):
                conn.execute(rollback)
    conn.execute(commit)


@contextmanager
def _errors_naming_row(first: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (server_message := server_error(error)) is None:
            raise
        # Only the row's number is used: the rest of the context repeats the row's values.
        context = getattr(error, "context", None) or getattr(getattr(error, "diag", None), "context", None) or ""
        row = _LINE.search(context)
        where = f"payloads[{first + int(row[1]) - 1}]: " if row else ""
        if (refused := refused_error(*server_message, where=where)) is None:
            raise
        raise refused from None
