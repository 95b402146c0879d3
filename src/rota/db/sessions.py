"""The settings of database sessions, and the two connection classes that pools use."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import timedelta

STATEMENT_SECONDS = 10.0
"""A statement without an answer after this time is treated as a lost connection."""

FAILOVER_STATEMENT_SECONDS = 5.0
"""The same limit for a URL with several hosts: jobs have to run on another host within ten seconds."""

UNACKNOWLEDGED_SECONDS = 4.0
"""A connection is dropped if the server's machine acknowledges no packet for this long."""

KEEPALIVES = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "4"}
"""The server notices within 13 seconds that a client is unreachable, and rolls back its open transaction."""

PLANS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off"}
"""Force index scans: each of rota's own statements is written for one index, and SQL has no index hints.

Without these, the server keeps a sequential scan that it planned while the table was nearly empty. When a burst has filled the
table, a claim takes 500 ms instead of 2 ms until the next ANALYZE. Generic plans are also cheaper: for batches of 20, planning
costs as much as claiming. JIT is off because the high estimated cost of a disabled scan would trigger it. Behind a pooler no plan
is cached, so every execution is planned for the current table.
"""

TIMEZONE = {"timezone": "UTC"}
"""In other time zones a day may have 23 or 25 hours when the server adds intervals. PgBouncer keeps this setting per client."""

ISOLATION = {"default_transaction_isolation": "read committed"}
"""rota's statements read a row again after another session has changed it. At a stricter isolation level they would fail."""

NAME_RESOLUTION = {"search_path": "pg_catalog, pg_temp", "row_security": "off"}
"""Resolve names in pg_catalog only, so that an object of another login can't replace a built-in one.

With row_security off, a policy that would hide rows from this login raises an error instead.
"""

IDLE_TIMEOUT = {"idle_in_transaction_session_timeout": "60000"}
"""In milliseconds. A shorter timeout of the whole database would end rota's transactions between two of their round trips."""

BEGIN_WITH_SETTINGS = "".join(
    [
        "begin isolation level read committed",
        *(f"; set local {name} = {value}" for name, value in (NAME_RESOLUTION | IDLE_TIMEOUT).items()),
    ]
)
"""Begins a transaction with these settings where the session can't have them: behind a pooler."""

RESET_SESSION = """
    set session authorization default; reset role; reset all; discard temp;
    close all; unlisten *; select pg_catalog.pg_advisory_unlock_all()
"""
"""Resets a session between two handlers, except for its prepared statements.

asyncpg's own reset keeps the role and temporary tables.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the database is reached: whether through a pooler, and properties of the server."""

    pooled: bool
    version: int
    synchronous_commit: str


ROUTE_OF_COMMANDS = Route(pooled=True, version=0, synchronous_commit="on")
"""Commands connect as if through a pooler, which always works and needs no probe of the server first."""


class StatementwiseConnection(asyncpg.Connection):
    """A connection for rota's own statements without session settings: each statement runs in a transaction that sets them.

    For poolers, which refuse settings and may send each transaction to another server session. Costs two round trips a statement.
    """

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109
        """Run a statement with the settings. A `begin` sets them for the whole transaction."""
        if not args and not self.is_in_transaction() and query.lstrip()[:5].lower() == "begin":
            return await super().execute(f"{BEGIN_WITH_SETTINGS}{query.strip()[5:]}", timeout=timeout)
        async with self._with_settings(timeout):
            return await super().execute(query, *args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run a statement with the settings."""
        async with self._with_settings(timeout):
            return await super().fetch(query, *args, timeout=timeout, **options)

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run a statement with the settings."""
        async with self._with_settings(timeout):
            return await super().fetchrow(query, *args, timeout=timeout, **options)

    async def fetchval(self, query: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        """Run a statement with the settings."""
        async with self._with_settings(timeout):
            return await super().fetchval(query, *args, timeout=timeout, **options)

    @asynccontextmanager
    async def _with_settings(self, timeout: float | None) -> AsyncIterator[None]:  # noqa: ASYNC109
        if self.is_in_transaction():
            yield
            return
        try:
            await super().execute(BEGIN_WITH_SETTINGS, timeout=timeout)
            yield
            await super().execute("commit", timeout=timeout)
        except BaseException:
            try:
                if self.is_in_transaction():
                    await super().execute("rollback", timeout=timeout or STATEMENT_SECONDS)
            except BaseException:
                self.terminate()  # an open transaction would keep its locks, and the next statement would join it
                raise
            raise


class HandlerConnection(asyncpg.Connection):
    """A connection that handlers use one after the other. Records the type codecs that a handler sets, to reset them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._codecs: set[tuple[str, str]] = set()

    async def set_type_codec(self, typename: str, *, schema: str = "public", **options: Any) -> None:
        """Set the codec and record it."""
        self._codecs.add((typename, schema))
        await super().set_type_codec(typename, schema=schema, **options)

    async def set_builtin_type_codec(self, typename: str, *, schema: str = "public", **options: Any) -> None:
        """Set the codec and record it."""
        self._codecs.add((typename, schema))
        await super().set_builtin_type_codec(typename, schema=schema, **options)

    async def reset_for_next_handler(self) -> None:
        """Undo everything that a handler may have set. Raises TimeoutError if the server does not answer."""
        async with asyncio.timeout(STATEMENT_SECONDS):
            await self.execute(RESET_SESSION)
            while self._codecs:
                typename, schema = self._codecs.pop()
                await self.reset_type_codec(typename, schema=schema)


def own_session_options(route: Route, name: str) -> dict[str, Any]:
    """Return asyncpg's connection options for a session that runs rota's own statements only."""
    options: dict[str, Any] = {
        "statement_cache_size": 0 if route.pooled else 100,
        "server_settings": own_session_settings(route, name),
    }
    return options | {"connection_class": StatementwiseConnection} if route.pooled else options


def own_session_settings(route: Route, name: str) -> dict[str, str]:
    """Return the server settings for a session that runs rota's own statements only."""
    return _common_settings(route, name) | TIMEZONE | ({} if route.pooled else PLANS | ISOLATION | NAME_RESOLUTION)


def handler_session_settings(route: Route, name: str, lease: timedelta) -> dict[str, str]:
    """Return the server settings for a session that runs handlers' transactions."""
    settings = _common_settings(route, name)
    if not route.pooled:
        # A stopped or disconnected client must not keep its locks after its lease has ended.
        settings["idle_in_transaction_session_timeout"] = format_milliseconds(lease)
    return settings


def _common_settings(route: Route, name: str) -> dict[str, str]:
    settings = {"application_name": name}
    if not route.pooled:  # a pooler accepts no other settings
        settings |= KEEPALIVES
        # A timeout set for the whole database would close the listening connection whenever it is quiet.
        settings["idle_session_timeout"] = "0"
        if route.synchronous_commit == "off":
            # Without this, a crash of the server undoes settlements that were already acknowledged.
            settings["synchronous_commit"] = "on"
    return settings


def format_milliseconds(length: timedelta) -> str:
    """Format a length of time for a server setting."""
    return f"{int(length.total_seconds() * 1000)}ms"
