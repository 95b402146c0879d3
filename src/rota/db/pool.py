"""Connections: pools, what a lost connection raises, and what a pooler between us and the server changes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.exceptions import InterfaceError, InternalClientError

from rota.db.connecting import LOGIN_REFUSED, NoServerFits, close_connection, open_connection
from rota.db.salvage import LOST
from rota.db.sql import SQL
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from datetime import timedelta

    from rota.db.connecting import Target

    Accept = Callable[[asyncpg.Connection], Coroutine[None, None, None]]

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
Pool = asyncpg.Pool


class ConnectionLost(OSError):
    """A driver error without an SQLSTATE, on a connection that turned out to be closed."""


IDLE_SECONDS = 15.0
"""After this time without use a connection is closed: an idle daemon keeps one, besides the listener's."""

PATIENCE = 10.0
"""Seconds after which a statement without an answer is taken for a cut link."""


KEEPALIVES = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "4"}
"""With them the server notices within 13 seconds that whoever holds a transaction open was cut off."""

PLANS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off"}
"""Our own statements go by an index each, and no form of a statement can say so.

Without it, the server keeps a plan that it made when the table was nearly empty, a sequential scan, and holds on to it when a burst
has filled the table: a claim then takes 500 ms instead of 2, until the next ANALYZE. Generic plans are also the cheaper ones: at
batches of 20, planning costs as much as claiming. No jit: where a scan has no alternative, its forbidding cost would set it off.
Behind a pooler nothing is kept, and every execution is planned for the table as it is.
"""


CLOCK = {"timezone": "UTC"}
"""A day is 24 hours: in another timezone the server adds days that a change of the clocks makes longer or shorter.

PgBouncer keeps it for each of its clients.
"""

ISOLATION = {"default_transaction_isolation": "read committed"}
"""Our statements look again at a row that somebody was faster at. Under a stricter one, set for everybody, they would fail."""

NAMES = {"search_path": "pg_catalog, pg_temp", "row_security": "off"}
"""Names resolve in pg_catalog, so that no function, operator or type of another login can take the place of a built-in one.

With row_security off, a policy that would hide rows from this login raises an error instead.
"""

IDLING = {"idle_in_transaction_session_timeout": "60000"}
"""Milliseconds. A shorter timeout, set for the whole database, would end our transactions between two of their round trips."""

SETTLED_BEGIN = "".join(
    [
        "begin isolation level read committed",
        *(f"; set local {name} = {value}" for name, value in (NAMES | IDLING).items()),
    ]
)
"""Begins a transaction with our settings where a session can't have them: behind a pooler."""


FORGET = """
    set session authorization default; reset role; reset all; discard temp;
    close all; unlisten *; select pg_catalog.pg_advisory_unlock_all()
"""
"""Makes a session like a new one, but for what is prepared in it: what a handler leaves, the next one must not find.

The driver's own reset leaves a role and temporary tables.
"""

WHY_READ_ONLY = "(a standby, or default_transaction_read_only is on)"
TO_THE_PRIMARY = "give the URL of the primary, or list all hosts with ?target_session_attrs=read-write"
READ_ONLY = f"this server is read-only {WHY_READ_ONLY}: {TO_THE_PRIMARY}"


class StatementwiseConnection(asyncpg.Connection):
    """A connection for our own statements that needs no session settings: each statement runs in a transaction that sets them.

    For poolers, which refuse settings and may send each transaction to another server session. Costs two round trips a statement.
    """

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109
        """Run it with our settings; a statement that begins a transaction sets them for all that follows in it."""
        if not args and not self.is_in_transaction() and query.lstrip()[:5].lower() == "begin":
            return await super().execute(f"{SETTLED_BEGIN}{query.strip()[5:]}", timeout=timeout)
        async with self._settled(timeout):
            return await super().execute(query, *args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run it with our settings."""
        async with self._settled(timeout):
            return await super().fetch(query, *args, timeout=timeout, **options)

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run it with our settings."""
        async with self._settled(timeout):
            return await super().fetchrow(query, *args, timeout=timeout, **options)

    async def fetchval(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run it with our settings."""
        async with self._settled(timeout):
            return await super().fetchval(query, *args, timeout=timeout, **options)

    @asynccontextmanager
    async def _settled(self, timeout: float | None) -> AsyncIterator[None]:  # noqa: ASYNC109
        if self.is_in_transaction():
            yield
            return
        try:
            await super().execute(SETTLED_BEGIN, timeout=timeout)
            yield
            await super().execute("commit", timeout=timeout)
        except BaseException:
            try:
                if self.is_in_transaction():
                    await super().execute("rollback", timeout=timeout or PATIENCE)
            except BaseException:
                self.terminate()  # a transaction left open would keep its locks, and the next statement would join it
                raise
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way to the database: whether a pooler stands in between, and what the server is."""

    pooled: bool
    version: int
    synchronous_commit: str


ROUTE_OF_COMMANDS = Route(pooled=True, version=0, synchronous_commit="on")
"""For one command, a connection as if through a pooler is good enough, and needs no look at the server first."""


def cut(conn: Connection) -> bool:
    """Tell whether the connection is gone."""
    try:
        return conn.is_closed()
    except InterfaceError:
        return True  # the pool has taken it back already


@contextmanager
def cut_is_transient(conn: Connection) -> Iterator[None]:
    """Have whatever a cut of this connection causes inside leave as one of TRANSIENT."""
    try:
        yield
    except (InterfaceError, InternalClientError) as error:
        if cut(conn):
            raise ConnectionLost(str(error)) from error
        raise


@asynccontextmanager
async def connection(pool: Pool, patience: float = PATIENCE) -> AsyncIterator[Connection]:
    """Lend a connection. Whatever a cut causes inside leaves as one of TRANSIENT."""
    conn = await pool.acquire(timeout=patience)
    try:
        with cut_is_transient(conn):
            yield conn
    except (TimeoutError, asyncpg.ReadOnlySQLTransactionError):
        # Without this, a connection over a cut link, or to a server that is a standby now, goes back to the pool.
        with suppress(*LOST):
            conn.terminate()
        raise
    finally:
        # A release may fail after the statement has committed; its rows must not be thrown away for that.
        try:
            with suppress(*LOST):
                await pool.release(conn, timeout=patience)
        except asyncio.CancelledError:
            # The driver's own task may have been cancelled before it began: the connection would stay lent for ever.
            with suppress(*LOST):
                conn.terminate()
            raise


def is_pooled(conn: Connection, *, pid: int) -> bool:
    """Tell whether a pooler stands between us and the server, whose process answers to `pid`."""
    # PgBouncer makes up the process id that it tells its clients.
    return pid != conn.get_server_pid()


def refuse_encoding(encoding: str) -> None:
    """Raise DatabaseUnusable for a database that can't hold every text, or holds bytes that are none: one such row ends a claim."""
    if encoding != "UTF8":
        raise DatabaseUnusable(
            f"the database's encoding is {encoding}, and rota needs UTF8: create database … encoding 'UTF8' template template0"
        )


def no_answer(where: str, said: str) -> DatabaseUnusable:
    """Return the error for a server that can't be reached; `where` is its URL without a password."""
    return DatabaseUnusable(
        f"no database answers at {where} ({said}): is the server running, and is the URL right? "
        "For a first look without a server of your own: rota dev"
    )


async def probe(target: Target) -> Route:
    """Look at the server once, at start. Raises DatabaseUnusable where a person has to act; TRANSIENT where waiting helps.

    Of these, NoServerFits says that a server answered and takes no writes: a fail-over may be under way.
    """
    try:
        conn = await open_connection(target, statement_cache_size=0, connection_class=StatementwiseConnection)
    except LOGIN_REFUSED as error:
        raise DatabaseUnusable(
            f"the database refuses us: {error}. Check user, password and database name in the URL"
        ) from error
    except (ValueError, asyncpg.ClientConfigurationError) as error:
        raise DatabaseUnusable(f"the database URL can't be used: {error}") from error
    try:
        row = await conn.fetchrow(SQL["describe_server"], timeout=PATIENCE)
        if row is None:
            raise DatabaseUnusable("the server doesn't answer a plain SELECT")
        if row["version"] < 140000:
            raise DatabaseUnusable(f"PostgreSQL {row['version'] // 10000} is too old: rota needs 14 or later")
        refuse_encoding(row["encoding"])
        if row["read_only"]:
            raise NoServerFits(READ_ONLY)
        return Route(
            pooled=is_pooled(conn, pid=row["pid"]), version=row["version"], synchronous_commit=row["synchronous_commit"]
        )
    finally:
        await close_connection(conn)


async def open_pool(
    target: Target,
    *,
    route: Route,
    name: str,
    size: int,
    patience: float = PATIENCE,
    on_connect: Accept,
) -> Pool:
    """Open the daemon's own pool: claims, settlements, housekeeping. `on_connect` runs before a new connection is used.

    Where it raises a transient error, the next host of the URL is tried.
    """

    async def keep(_: asyncpg.Connection) -> None:
        # Nothing here leaves state in a session, and the driver's own reset costs four times the statement.
        return

    pool: Pool = await asyncpg.create_pool(
        connect=_opener(target, accept=on_connect),
        min_size=0,
        max_size=size,
        reset=keep,
        command_timeout=patience,
        max_inactive_connection_lifetime=IDLE_SECONDS,
        **our_session(route, name),
    )
    return pool


def _opener(
    target: Target, *, accept: Accept | None = None
) -> Callable[..., Coroutine[None, None, asyncpg.Connection]]:
    """Return the function with which a running daemon opens its connections. It raises nothing but TRANSIENT, and what `accept`
    raises.
    """

    async def accept_or_cut(conn: asyncpg.Connection) -> None:
        with cut_is_transient(conn):
            if accept is not None:
                await accept(conn)

    async def reopen(*_: Any, **options: Any) -> asyncpg.Connection:
        try:
            return await open_connection(target, accept=accept_or_cut, **options)
        except asyncpg.ClientConfigurationError as error:
            # A certificate or service file that is being replaced: at start it was there.
            raise ConnectionLost(f"the database URL can't be used: {error}") from error

    return reopen


def expire(pool: Pool) -> None:
    """Replace the pool's connections: idle ones when they are wanted again, those in use when they come back."""
    pool._generation += 1  # type: ignore[attr-defined]  # noqa: SLF001  expire_connections() does no more, but is a coroutine


@asynccontextmanager
async def closing(pool: Pool) -> AsyncIterator[Pool]:
    """Close the pool at the end; at once, where it doesn't close by itself in good time."""
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


class HandlerConnection(asyncpg.Connection):
    """A connection that is lent to one handler after the other, and remembers which codecs one has set."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._codecs: set[tuple[str, str]] = set()

    async def set_type_codec(self, typename: str, *, schema: str = "public", **options: Any) -> None:
        """Do as the driver does, and remember it."""
        self._codecs.add((typename, schema))
        await super().set_type_codec(typename, schema=schema, **options)

    async def set_builtin_type_codec(self, typename: str, *, schema: str = "public", **options: Any) -> None:
        """Do as the driver does, and remember it."""
        self._codecs.add((typename, schema))
        await super().set_builtin_type_codec(typename, schema=schema, **options)

    async def forget(self) -> None:
        """Be like new. Raises TimeoutError over a cut link."""
        async with asyncio.timeout(PATIENCE):
            await self.execute(FORGET)
            while self._codecs:
                typename, schema = self._codecs.pop()
                await self.reset_type_codec(typename, schema=schema)


async def open_handler_pool(
    target: Target, *, route: Route, name: str, size: int, lease: timedelta, accept: Accept
) -> Pool:
    """Open the pool that handlers' transactions run on: the driver's default settings, and an end to forgotten transactions."""

    async def forget(conn: asyncpg.Connection) -> None:
        assert isinstance(conn, HandlerConnection)  # noqa: S101  as said below
        await conn.forget()

    return await asyncpg.create_pool(
        connect=_opener(target, accept=accept),
        min_size=0,
        max_size=size,
        max_inactive_connection_lifetime=IDLE_SECONDS,
        statement_cache_size=0 if route.pooled else 100,
        server_settings=handler_session_settings(route, name, lease),
        connection_class=HandlerConnection,
        reset=forget,
    )


async def connect(
    target: Target, *, route: Route, name: str, patience: float = PATIENCE, accept: Accept | None = None
) -> asyncpg.Connection:
    """Open one connection outside of any pool, for our own statements only. `accept` is as with open_pool's `on_connect`."""
    return await _opener(target, accept=accept)(limit=patience, command_timeout=patience, **our_session(route, name))


def our_session(route: Route, name: str) -> dict[str, Any]:
    """Return the driver's options for a session in which only our own statements run."""
    options: dict[str, Any] = {
        "statement_cache_size": 0 if route.pooled else 100,
        "server_settings": our_settings(route, name),
    }
    return options | {"connection_class": StatementwiseConnection} if route.pooled else options


def our_settings(route: Route, name: str) -> dict[str, str]:
    """Return the settings of a session in which only our own statements run."""
    return session_settings(route, name) | CLOCK | ({} if route.pooled else PLANS | ISOLATION | NAMES)


def session_settings(route: Route, name: str) -> dict[str, str]:
    """Return the settings of a session of ours. A pooler accepts none of them but the name."""
    settings = {"application_name": name}
    if not route.pooled:
        settings |= KEEPALIVES
        # A database-wide one would cut the listening connection whenever it is quiet.
        settings["idle_session_timeout"] = "0"
        if route.synchronous_commit == "off":
            # Without it, a crash of the server takes back settlements that were already acknowledged.
            settings["synchronous_commit"] = "on"
    return settings


def handler_session_settings(route: Route, name: str, lease: timedelta) -> dict[str, str]:
    """Return the settings of a session that runs a handler's transaction."""
    settings = session_settings(route, name)
    if not route.pooled:
        # A holder that was stopped or cut off must not keep its locks beyond its lease.
        settings["idle_in_transaction_session_timeout"] = idling(lease)
    return settings


def idling(lease: timedelta) -> str:
    """Write for how long a transaction may idle, as the server reads it."""
    return f"{int(lease.total_seconds() * 1000)}ms"
