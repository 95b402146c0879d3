"""The statements that run on a connection of the caller's, whichever driver it belongs to.

Besides this file only `copying` and `blocking` know other drivers than asyncpg. None of them is imported here: a connection is
told by its class's name, and whoever holds one has imported its driver. All run the same files of sql/queries; only the writing
of parameters differs.
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
        """Connect, where it isn't."""
        ...

    def cursor(self) -> Any:
        """Return a cursor."""
        ...

    def validate_no_broken_transaction(self) -> None:
        """Raise in a transaction that has to be rolled back."""
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
"""What runs on connections of others."""

STALE = "RT001"
"""The SQLSTATE of a fence token that is no longer the current one."""


async def fetch(conn: AsyncConn, query: Query, *arguments: Any, caller: str) -> Sequence[Any] | None:
    """Run sql/queries/<query>.sql in whatever transaction is open on an asynchronous connection; return its first row.

    Raises TypeError for what is no such connection, naming what `caller` takes; Refused for what the database says no to.
    """
    run = _way(type(conn), _ASYNC, caller)
    try:
        row: Sequence[Any] | None = await run(conn, query, arguments)
    except Exception as error:
        if (refused := _refused(error)) is not None:
            raise refused from None
        raise
    return row


def fetch_sync(conn: SyncConn, query: Query, *arguments: Any, caller: str) -> Sequence[Any] | None:
    """Do the same on a blocking connection."""
    run = _way(type(conn), _SYNC, caller)
    try:
        row: Sequence[Any] | None = run(conn, query, arguments)
    except Exception as error:
        if (refused := _refused(error)) is not None:
            raise refused from None
        raise
    return row


def check_async(conn: object, caller: str) -> None:
    """Raise TypeError unless it is an asynchronous connection."""
    _way(type(conn), _ASYNC, caller)


def check_sync(conn: object, caller: str) -> None:
    """Raise TypeError unless it is a blocking connection."""
    _way(type(conn), _SYNC, caller)


async def _asyncpg(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    return await conn.fetchrow(SQL[query], *arguments)


async def _psycopg_async(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    from psycopg import AsyncRawCursor  # noqa: PLC0415  whoever holds a connection has it
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
    result = await conn.execute(_clause(query, tuple(map(type, arguments))), _named(arguments))
    return result.first()


def _sqlalchemy(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    return conn.execute(_clause(query, tuple(map(type, arguments))), _named(arguments)).first()


def _django(conn: Any, query: Query, arguments: Sequence[Any]) -> Any:
    with conn.cursor() as cursor:
        raw = getattr(cursor.cursor, "connection", None)
        if (type(raw).__module__, type(raw).__name__) != ("psycopg", "Connection"):
            cursor.execute(_pyformat(query), _named(arguments))
            return cursor.fetchone()
        # Django's own cursors write the arguments into the statement, which pg_stat_activity shows and its debug log keeps.
        conn.validate_no_broken_transaction()
        with conn.wrap_database_errors:
            return _psycopg(raw, query, arguments)


_PARAMETER = re.compile(r"\$(\d+)")


def _named(arguments: Sequence[Any]) -> dict[str, Any]:
    return {f"p{number}": argument for number, argument in enumerate(arguments, 1)}


@cache
def _statement(query: Query) -> str:
    """The statement without its comments, whose signs could be taken for parameters."""
    return "\n".join(line for line in SQL[query].splitlines() if not line.lstrip().startswith("--"))


@cache
def _pyformat(query: Query) -> str:
    return _PARAMETER.sub(r"%(p\1)s", _statement(query).replace("%", "%%"))


@cache
def _clause(query: Query, types: tuple[type, ...]) -> sqlalchemy.TextClause:
    from sqlalchemy import BigInteger, Float, Text, Uuid, bindparam, text  # noqa: PLC0415

    # Without a type, SQLAlchemy casts a number to INTEGER, which a fence token doesn't fit into.
    known: dict[type, Any] = {int: BigInteger(), str: Text(), type(None): Text(), float: Float(), UUID: Uuid()}
    sql = _PARAMETER.sub(r":p\1", _statement(query).replace(":", r"\:"))
    return text(sql).bindparams(*(bindparam(f"p{number}", type_=known[t]) for number, t in enumerate(types, 1)))


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    run: Callable[[Any, Query, Sequence[Any]], Any]


_ASYNC = {
    ("asyncpg", "Connection"): _Kind("an asyncpg connection", _asyncpg),
    ("asyncpg", "PoolConnectionProxy"): _Kind("an asyncpg connection", _asyncpg),
    ("psycopg", "AsyncConnection"): _Kind("a psycopg AsyncConnection", _psycopg_async),
    ("sqlalchemy", "AsyncConnection"): _Kind("an SQLAlchemy AsyncConnection", _sqlalchemy_async),
    ("sqlalchemy", "AsyncSession"): _Kind("an SQLAlchemy AsyncSession", _sqlalchemy_async),
    ("sqlalchemy", "async_scoped_session"): _Kind("an SQLAlchemy AsyncSession", _sqlalchemy_async),
}
_SYNC = {
    ("psycopg", "Connection"): _Kind("a psycopg Connection", _psycopg),
    ("sqlalchemy", "Connection"): _Kind("an SQLAlchemy Connection", _sqlalchemy),
    ("sqlalchemy", "Session"): _Kind("an SQLAlchemy Session", _sqlalchemy),
    ("sqlalchemy", "scoped_session"): _Kind("an SQLAlchemy Session", _sqlalchemy),
    ("django", "BaseDatabaseWrapper"): _Kind("Django's connection", _django),
    ("django", "ConnectionProxy"): _Kind("Django's connection", _django),
}
_MAKERS = {
    "Pool",
    "ConnectionPool",
    "AsyncConnectionPool",
    "Engine",
    "AsyncEngine",
    "sessionmaker",
    "async_sessionmaker",
}
_CURSORS = {"Cursor", "AsyncCursor"}

_TWINS = {"rota.enqueue": "rota.enqueue_sync", "rota.enqueue_many": "rota.enqueue_many_sync"}
_TWINS |= {twin: name for name, twin in _TWINS.items()}


def _way(cls: type, wanted: dict[tuple[str, str], _Kind], caller: str) -> Callable[[Any, Query, Sequence[Any]], Any]:
    for base in cls.__mro__:
        if (kind := wanted.get(_origin(base))) is not None:
            return kind.run
    raise TypeError(_advice(cls, wanted, caller))


def is_of(conn: object, driver: str, names: set[str]) -> bool:
    """Say whether it is an instance of a class of this driver's that has one of these names."""
    return any(origin == driver and name in names for origin, name in map(_origin, type(conn).__mro__))


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__.partition(".")[0], cls.__name__


def _advice(cls: type, wanted: dict[tuple[str, str], _Kind], caller: str) -> str:
    given = f"{cls.__module__}.{cls.__qualname__}"
    others = _SYNC if wanted is _ASYNC else _ASYNC
    kinds = list(dict.fromkeys(kind.name for kind in wanted.values()))
    taken = f"{caller} takes {', '.join(kinds[:-1])} or {kinds[-1]}"
    for base in cls.__mro__:
        origin = _origin(base)
        if (kind := others.get(origin)) is not None:
            twin = _TWINS.get(caller) or f"{caller} of a {'plain def' if others is _SYNC else 'async def'} handler"
            return f"{caller} can't use {kind.name} ({given}): that is for {twin}. {taken}"
        if origin[1] in _MAKERS and origin[0] in {"asyncpg", "psycopg_pool", "sqlalchemy"}:
            return f"{taken}, not {given}: take a connection from it, so that this joins your transaction there"
        if origin[1] in _CURSORS and origin[0] == "psycopg":
            return f"{taken}, not a cursor: pass cursor.connection"
    return f"{taken}, not {given}"


def _refused(error: Exception) -> Refused | None:
    """Return our own error where the database says no; any other one leaves as it is, but without the parameters."""
    if (said := server_error(error)) is not None and (refused := refusal(*said)) is not None:
        return refused
    if hasattr(error, "hide_parameters"):
        error.hide_parameters = True  # SQLAlchemy's errors print them, and the payload is one
    return None


_REFUSALS = ("RT", "22", "23")
"""What the database says no to: rota's own refusals, values out of range, constraints."""


def refusal(sqlstate: str, message: str, *, where: str = "") -> Refused | None:
    """Return our own error if this is what the database says no with; `where` stands before the message."""
    return Refused(where + message, sqlstate=sqlstate) if sqlstate.startswith(_REFUSALS) else None


def server_error(error: BaseException) -> tuple[str, str] | None:
    """Return SQLSTATE and message of what the server said, without the detail that repeats the row; None if it said nothing."""
    left: BaseException | None = error
    found: tuple[str, str] | None = None
    while left is not None:
        state = getattr(left, "sqlstate", None) or getattr(left, "pgcode", None)
        message = getattr(getattr(left, "diag", None), "message_primary", None) or getattr(left, "message", None)
        if isinstance(state, str):
            found = state, message if isinstance(message, str) else type(left).__name__
            if isinstance(message, str):
                return found
        left = getattr(left, "orig", None) or left.__cause__
    return found
