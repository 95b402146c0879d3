"""Run statements on the caller's connection, with any supported driver.

Only this module, `copying` and `blocking` know drivers other than asyncpg. No optional driver is imported at module level: a
connection is recognised by the name of its class. All drivers run the same files of sql/queries; only the syntax of parameters
differs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import UUID

from rota.db.sql import SQL
from rota.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import asyncpg
    import psycopg
    import sqlalchemy
    import sqlalchemy.ext.asyncio
    import sqlalchemy.orm

    AsyncConn = (
        asyncpg.Connection
        | asyncpg.pool.PoolConnectionProxy
        | psycopg.AsyncConnection[Any]
        | sqlalchemy.ext.asyncio.AsyncConnection
        | sqlalchemy.ext.asyncio.AsyncSession
        | sqlalchemy.ext.asyncio.async_scoped_session[Any]
    )


class DjangoConn(Protocol):
    """`django.db.connection`, or one of `django.db.connections`."""

    def ensure_connection(self) -> None:
        """Connect if not connected."""
        ...

    def cursor(self) -> Any:
        """Return a cursor."""
        ...

    def validate_no_broken_transaction(self) -> None:
        """Raise if the transaction has to be rolled back."""
        ...


if TYPE_CHECKING:
    SyncConn = (
        psycopg.Connection[Any]
        | sqlalchemy.Connection
        | sqlalchemy.orm.Session
        | sqlalchemy.orm.scoped_session[Any]
        | DjangoConn
    )


Query = Literal[
    "enqueue_job",
    "enqueue_jobs",
    "enqueue_keyed_jobs",
    "find_enqueued",
    "complete_job",
    "guard_resource",
    "save_checkpoint",
    "limit_idling",
]
"""The statements that run on callers' connections."""

STALE = "RT001"
"""The SQLSTATE for a fence token that is not the current one."""


async def fetch(conn: AsyncConn, query: Query, *arguments: Any, caller: str) -> Sequence[Any] | None:
    """Run a statement on an asynchronous connection, in its open transaction if there is one; return the first row.

    Raises TypeError, naming the connections that `caller` accepts, for any other object; Refused if the database rejects a value.
    """
    run = _runner_for(type(conn), _ASYNC, caller)
    try:
        row: Sequence[Any] | None = await run(conn, query, arguments)
    except Exception as error:
        if (refused := _as_refused(error)) is not None:
            raise refused from None
        raise
    return row


def fetch_sync(conn: SyncConn, query: Query, *arguments: Any, caller: str) -> Sequence[Any] | None:
    """Do the same on a blocking connection."""
    run = _runner_for(type(conn), _SYNC, caller)
    try:
        row: Sequence[Any] | None = run(conn, query, arguments)
    except Exception as error:
        if (refused := _as_refused(error)) is not None:
            raise refused from None
        raise
    return row


def check_async(conn: object, caller: str) -> None:
    """Raise TypeError unless it is an asynchronous connection."""
    _runner_for(type(conn), _ASYNC, caller)


def check_sync(conn: object, caller: str) -> None:
    """Raise TypeError unless it is a blocking connection."""
    _runner_for(type(conn), _SYNC, caller)


async def _asyncpg(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    return await conn.fetchrow(SQL[query], *arguments)


async def _psycopg_async(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    from psycopg import AsyncRawCursor  # noqa: PLC0415  optional, and installed if there is a connection
    from psycopg.rows import tuple_row  # noqa: PLC0415

    async with AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(SQL[query].encode(), arguments)
        return await cursor.fetchone()


def _psycopg(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    from psycopg import RawCursor  # noqa: PLC0415
    from psycopg.rows import tuple_row  # noqa: PLC0415

    with RawCursor(conn, row_factory=tuple_row) as cursor:
        cursor.execute(SQL[query].encode(), arguments)
        return cursor.fetchone()


async def _sqlalchemy_async(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    result = await conn.execute(_sqlalchemy_clause(query, tuple(map(type, arguments))), _parameters_by_name(arguments))
    return result.first()


def _sqlalchemy(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    return conn.execute(_sqlalchemy_clause(query, tuple(map(type, arguments))), _parameters_by_name(arguments)).first()


def _django(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    with conn.cursor() as cursor:
        raw = getattr(cursor.cursor, "connection", None)
        if (type(raw).__module__, type(raw).__name__) != ("psycopg", "Connection"):
            cursor.execute(_sql_in_pyformat(query), _parameters_by_name(arguments))
            return cursor.fetchone()
        # Django's cursors write the arguments into the statement's text, which appears in pg_stat_activity and Django's debug log.
        conn.validate_no_broken_transaction()
        with conn.wrap_database_errors:
            return _psycopg(raw, query, arguments)


_PARAMETER = re.compile(r"\$(\d+)")


def _parameters_by_name(arguments: Sequence[Any]) -> dict[str, Any]:
    return {f"p{number}": argument for number, argument in enumerate(arguments, 1)}


@cache
def _sql_without_comments(query: Query) -> str:
    """Return the statement without comments, which may contain characters that look like parameters."""
    return "\n".join(line for line in SQL[query].splitlines() if not line.lstrip().startswith("--"))


@cache
def _sql_in_pyformat(query: Query) -> str:
    return _PARAMETER.sub(r"%(p\1)s", _sql_without_comments(query).replace("%", "%%"))


@cache
def _sqlalchemy_clause(query: Query, types: tuple[type, ...]) -> sqlalchemy.TextClause:
    from sqlalchemy import BigInteger, Float, Text, Uuid, bindparam, text  # noqa: PLC0415

    # Without a type, SQLAlchemy casts a number to INTEGER, which is too small for a fence token.
    sql_types: dict[type, Any] = {int: BigInteger(), str: Text(), type(None): Text(), float: Float(), UUID: Uuid()}
    sql = _PARAMETER.sub(r":p\1", _sql_without_comments(query).replace(":", r"\:"))
    return text(sql).bindparams(
        *(bindparam(f"p{number}", type_=sql_types[kind]) for number, kind in enumerate(types, 1))
    )


@dataclass(frozen=True, slots=True)
class _Driver:
    name: str
    run: Callable[[Any, Query, Sequence[Any]], Any]


_ASYNC = {
    ("asyncpg", "Connection"): _Driver("an asyncpg connection", _asyncpg),
    ("asyncpg", "PoolConnectionProxy"): _Driver("an asyncpg connection", _asyncpg),
    ("psycopg", "AsyncConnection"): _Driver("a psycopg AsyncConnection", _psycopg_async),
    ("sqlalchemy", "AsyncConnection"): _Driver("an SQLAlchemy AsyncConnection", _sqlalchemy_async),
    ("sqlalchemy", "AsyncSession"): _Driver("an SQLAlchemy AsyncSession", _sqlalchemy_async),
    ("sqlalchemy", "async_scoped_session"): _Driver("an SQLAlchemy AsyncSession", _sqlalchemy_async),
}
_SYNC = {
    ("psycopg", "Connection"): _Driver("a psycopg Connection", _psycopg),
    ("sqlalchemy", "Connection"): _Driver("an SQLAlchemy Connection", _sqlalchemy),
    ("sqlalchemy", "Session"): _Driver("an SQLAlchemy Session", _sqlalchemy),
    ("sqlalchemy", "scoped_session"): _Driver("an SQLAlchemy Session", _sqlalchemy),
    ("django", "BaseDatabaseWrapper"): _Driver("Django's connection", _django),
    ("django", "ConnectionProxy"): _Driver("Django's connection", _django),
}
_CONNECTION_SOURCES = {
    "Pool",
    "ConnectionPool",
    "AsyncConnectionPool",
    "Engine",
    "AsyncEngine",
    "sessionmaker",
    "async_sessionmaker",
}
_CURSORS = {"Cursor", "AsyncCursor"}

_SYNC_COUNTERPARTS = {"rota.enqueue": "rota.enqueue_sync", "rota.enqueue_many": "rota.enqueue_many_sync"}
_SYNC_COUNTERPARTS |= {counterpart: name for name, counterpart in _SYNC_COUNTERPARTS.items()}


def _runner_for(
    cls: type, accepted_drivers: dict[tuple[str, str], _Driver], caller: str
) -> Callable[[Any, Query, Sequence[Any]], Any]:
    for base in cls.__mro__:
        if (driver := accepted_drivers.get(_package_and_name(base))) is not None:
            return driver.run
    raise TypeError(_type_error_text(cls, accepted_drivers, caller))


def is_instance_of(conn: object, driver: str, names: set[str]) -> bool:
    """Return whether the class of `conn`, or a base class, is one of these classes of the driver."""
    return any(origin == driver and name in names for origin, name in map(_package_and_name, type(conn).__mro__))


def _package_and_name(cls: type) -> tuple[str, str]:
    return cls.__module__.partition(".")[0], cls.__name__


def _type_error_text(cls: type, accepted_drivers: dict[tuple[str, str], _Driver], caller: str) -> str:
    given = f"{cls.__module__}.{cls.__qualname__}"
    others = _SYNC if accepted_drivers is _ASYNC else _ASYNC
    names = list(dict.fromkeys(driver.name for driver in accepted_drivers.values()))
    accepted = f"{caller} takes {', '.join(names[:-1])} or {names[-1]}"
    for base in cls.__mro__:
        origin = _package_and_name(base)
        if (driver := others.get(origin)) is not None:
            default = f"{caller} of a {'plain def' if others is _SYNC else 'async def'} handler"
            counterpart = _SYNC_COUNTERPARTS.get(caller, default)
            return f"{caller} can't use {driver.name} ({given}): that is for {counterpart}. {accepted}"
        if origin[1] in _CONNECTION_SOURCES and origin[0] in {"asyncpg", "psycopg_pool", "sqlalchemy"}:
            return f"{accepted}, not {given}: take a connection from it, so that this joins your transaction there"
        if origin[1] in _CURSORS and origin[0] == "psycopg":
            return f"{accepted}, not a cursor: pass cursor.connection"
    return f"{accepted}, not {given}"


def _as_refused(error: Exception) -> Refused | None:
    """Return Refused if the database rejected the values, else None. Also hides the parameters in SQLAlchemy's error."""
    if (from_server := server_error(error)) is not None and (refused := refused_error(*from_server)) is not None:
        return refused
    if hasattr(error, "hide_parameters"):
        error.hide_parameters = True  # the payload is one of them
    return None


_REFUSED_SQLSTATES = ("RT", "22", "23")
"""Prefixes of the SQLSTATEs for a rejected value: of rota's functions, for invalid data, for violated constraints."""


def refused_error(sqlstate: str, message: str, *, where: str = "") -> Refused | None:
    """Return Refused if the SQLSTATE means a rejected value, else None. `where` is put before the message."""
    return Refused(where + message, sqlstate=sqlstate) if sqlstate.startswith(_REFUSED_SQLSTATES) else None


def server_error(error: BaseException) -> tuple[str, str] | None:
    """Return the server's SQLSTATE and message, without the detail, which repeats the row; None for an error of the client."""
    cause: BaseException | None = error
    state_and_message: tuple[str, str] | None = None
    while cause is not None:
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        message = getattr(getattr(cause, "diag", None), "message_primary", None) or getattr(cause, "message", None)
        if isinstance(state, str):
            state_and_message = state, message if isinstance(message, str) else type(cause).__name__
            if isinstance(message, str):
                return state_and_message
        cause = getattr(cause, "orig", None) or cause.__cause__
    return state_and_message
