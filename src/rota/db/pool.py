"""Connection pools, and the error that a lost connection raises."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.exceptions import InterfaceError, InternalClientError

from rota.db.connecting import host_addresses, mark_unresponsive, open_connection
from rota.db.salvage import LOST
from rota.db.sessions import (
    FAILOVER_STATEMENT_SECONDS,
    STATEMENT_SECONDS,
    HandlerConnection,
    handler_session_settings,
    own_session_options,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from datetime import timedelta

    from rota.db.connecting import Target
    from rota.db.sessions import Route

    Accept = Callable[[asyncpg.Connection], Coroutine[None, None, None]]

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
Pool = asyncpg.Pool

IDLE_SECONDS = 15.0
"""Connections that were unused for this long are closed. An idle daemon keeps one, besides the listener's."""

CANCEL_SECONDS = 0.3
"""Before a connection is closed after a timeout, the driver gets this time to cancel the statement over another connection.

Without that, the server would go on with the statement, and keep its locks, until it writes to the closed connection.
"""


class ConnectionLost(OSError):
    """A driver error without an SQLSTATE, on a connection that turned out to be closed."""


def is_connection_lost(conn: Connection) -> bool:
    """Return whether the connection is closed."""
    try:
        return conn.is_closed()
    except InterfaceError:
        return True  # the pool has taken it back already


@contextmanager
def raising_connection_lost(conn: Connection) -> Iterator[None]:
    """Replace driver errors raised inside the block by ConnectionLost, which is transient, if the connection is closed."""
    try:
        yield
    except (InterfaceError, InternalClientError) as error:
        if is_connection_lost(conn):
            raise ConnectionLost(str(error)) from error
        raise


@asynccontextmanager
async def connection(pool: Pool, patience: float = STATEMENT_SECONDS) -> AsyncIterator[Connection]:
    """Lend a connection; wait at most `patience` seconds for it. A connection lost inside raises one of TRANSIENT."""
    conn = await pool.acquire(timeout=patience)
    try:
        with raising_connection_lost(conn):
            yield conn
    except (TimeoutError, asyncpg.ReadOnlySQLTransactionError) as error:
        # The connection is dead, or its server has become a standby: keep it out of the pool. Idle ones probably lead to the same
        # server.
        expire_connections(pool)
        try:
            if isinstance(error, TimeoutError):
                with suppress(*LOST):
                    mark_unresponsive(conn)
                await asyncio.sleep(CANCEL_SECONDS)
        finally:
            with suppress(*LOST):
                conn.terminate()
        raise
    finally:
        # A failed release must not hide the result of a statement that has committed.
        try:
            with suppress(*LOST):
                await pool.release(conn, timeout=patience)
        except asyncio.CancelledError:
            # If the driver's release task was cancelled before it started, the connection would never return to the pool.
            with suppress(*LOST):
                conn.terminate()
            raise


async def fetch_one(db: Connection, query: str, *arguments: object) -> asyncpg.Record:
    """Run a statement that always returns at least one row; return the first row."""
    row = await db.fetchrow(query, *arguments)
    assert row is not None  # noqa: S101  the statement always returns a row
    return row


async def open_pool(
    target: Target,
    *,
    route: Route,
    name: str,
    size: int,
    on_connect: Accept,
) -> Pool:
    """Open the pool for the daemon's own statements.

    `on_connect` runs before a new connection is used. If it raises a transient error, the next host of the URL is tried.
    """

    async def keep_session(_: asyncpg.Connection) -> None:
        # rota's own statements leave no state in a session, and the driver's reset costs four times the statement.
        return

    pool: Pool = await asyncpg.create_pool(
        connect=_connection_opener(target, accept=on_connect),
        min_size=0,
        max_size=size,
        reset=keep_session,
        command_timeout=STATEMENT_SECONDS if len(host_addresses(target)) < 2 else FAILOVER_STATEMENT_SECONDS,
        max_inactive_connection_lifetime=IDLE_SECONDS,
        **own_session_options(route, name),
    )
    return pool


async def open_handler_pool(
    target: Target, *, route: Route, name: str, size: int, lease: timedelta, accept: Accept
) -> Pool:
    """Open the pool for handlers' transactions: the driver's default settings, and a limit for idle transactions."""

    async def reset(conn: asyncpg.Connection) -> None:
        assert isinstance(conn, HandlerConnection)  # noqa: S101  see connection_class
        await conn.reset_for_next_handler()

    return await asyncpg.create_pool(
        connect=_connection_opener(target, accept=accept),
        min_size=0,
        max_size=size,
        max_inactive_connection_lifetime=IDLE_SECONDS,
        statement_cache_size=0 if route.pooled else 100,
        server_settings=handler_session_settings(route, name, lease),
        connection_class=HandlerConnection,
        reset=reset,
    )


async def connect(
    target: Target, *, route: Route, name: str, patience: float = STATEMENT_SECONDS, accept: Accept | None = None
) -> asyncpg.Connection:
    """Open one connection for rota's own statements, outside of any pool. `accept` works like `on_connect` of open_pool."""
    return await _connection_opener(target, accept=accept)(
        limit=patience, command_timeout=patience, **own_session_options(route, name)
    )


def _connection_opener(
    target: Target, *, accept: Accept | None = None
) -> Callable[..., Coroutine[None, None, asyncpg.Connection]]:
    """Return a function that opens a connection. It raises only TRANSIENT errors, and those of `accept`."""

    async def accept_safely(conn: asyncpg.Connection) -> None:
        with raising_connection_lost(conn):
            if accept is not None:
                await accept(conn)

    async def open_or_raise_transient(*_: Any, **options: Any) -> asyncpg.Connection:
        try:
            return await open_connection(target, accept=accept_safely, **options)
        except asyncpg.ClientConfigurationError as error:
            # The URL was valid at start, so this is a certificate or service file that is being replaced.
            raise ConnectionLost(f"the database URL can't be used: {error}") from error

    return open_or_raise_transient


def expire_connections(pool: Pool) -> None:
    """Replace all connections of the pool: idle ones at their next use, lent ones when they are returned."""
    pool._generation += 1  # type: ignore[attr-defined]  # noqa: SLF001  same as expire_connections(), which is a coroutine


@asynccontextmanager
async def closing(pool: Pool) -> AsyncIterator[Pool]:
    """Close the pool at the end of the block. After 5 seconds, connections that are still lent are terminated."""
    try:
        yield pool
    finally:
        try:
            async with asyncio.timeout(5):
                await pool.close()
        except LOST:
            pool.terminate()
        except asyncio.CancelledError:
            pool.terminate()
            raise
