"""Wait for locks that other sessions hold during a migration, and name those sessions."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from rota.db.blockers import report_blockers, session_name
from rota.db.connecting import close_connection, open_connection
from rota.db.sql import SQL
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from rota.db.blockers import Blocker
    from rota.db.connecting import Target

RETRY_SECONDS = 1.0
"""Pause between two attempts to get a lock, in which other sessions can proceed."""

LOCK_SECONDS = 60.0
"""Limit for waiting for a lock that another session holds."""

MIGRATOR_SECONDS = 3600.0
"""Limit for waiting for another migrator, because building an index on a large table takes long."""

REPORT_AFTER_SECONDS = 2.0
"""How long to wait for another migrator before reporting it."""

POLL_SECONDS = 0.2
"""How often to check whether another migrator has finished."""

LOCK_MIGRATOR_ROW = "select from rota.migrations where version = 1 for update skip locked"
"""Locks the row that keeps other migrators out until the end of the transaction. Only the owner may lock it."""


class LockWaiter:
    """Waits for locks that other sessions hold, and reports those sessions with `say`."""

    def __init__(self, target: Target, conn: asyncpg.Connection, say: Callable[[str], None]) -> None:
        self._target = target
        self._conn = conn
        self._say = say
        self._reported_pids: set[int] = set()
        self._blockers: Sequence[Blocker] = ()

    async def run(self, work: Callable[[], Awaitable[None]], *, what: str) -> None:
        """Do the work in short attempts with pauses. Without the pauses, other sessions would queue behind this one for long.

        Raises DatabaseUnusable, naming the blocking session, after LOCK_SECONDS.
        """
        deadline = asyncio.get_running_loop().time() + LOCK_SECONDS
        async with report_blockers(self._target, self._conn, on_blocked=self._report_blocked):
            while asyncio.get_running_loop().time() < deadline:
                try:
                    return await work()
                except asyncpg.LockNotAvailableError:
                    await asyncio.sleep(RETRY_SECONDS)
        blocker_text = f": {self._blockers[0]}. To end it: {self._blockers[0].cure}" if self._blockers else ""
        raise DatabaseUnusable(
            f"{what} waits for a lock that another session has held for {LOCK_SECONDS:.0f} s{blocker_text}; "
            "nothing of it counts as applied, so run this again afterwards"
        )

    @asynccontextmanager
    async def only_migrator(self) -> AsyncIterator[None]:
        """Keep other migrators out. Uses its own connection, because some migrations can't run in a transaction."""
        lock_conn = await open_connection(self._target, statement_cache_size=0)
        try:
            # Timeouts set for the whole database must not end this transaction while a migration runs.
            await lock_conn.execute(
                "set search_path = pg_catalog, pg_temp; set idle_in_transaction_session_timeout = 0"
            )
            if await lock_conn.fetchval("select current_setting('transaction_timeout', true) is not null"):
                await lock_conn.execute("set transaction_timeout = 0")
            await self._wait_for_turn(lock_conn)
            yield
        finally:
            await close_connection(lock_conn)

    async def _wait_for_turn(self, lock_conn: asyncpg.Connection) -> None:
        loop = asyncio.get_running_loop()
        started_at, is_reported = loop.time(), False
        while not await self._lock_migrator_row(lock_conn):
            waited = loop.time() - started_at
            if (waited >= REPORT_AFTER_SECONDS and not is_reported) or waited >= MIGRATOR_SECONDS:
                session = await lock_conn.fetchrow(SQL["find_migrator"])
                named = session_name(*session) if session else "a session that can't be found"
                if waited >= MIGRATOR_SECONDS:
                    raise DatabaseUnusable(
                        f"another migration has been at work for {MIGRATOR_SECONDS:.0f} s: {named}. "
                        "Wait for its end, or end that session, and run this again"
                    )
                self._say(f"waiting for another migration: {named}")
                is_reported = True
            await asyncio.sleep(POLL_SECONDS)

    async def _lock_migrator_row(self, lock_conn: asyncpg.Connection) -> bool:
        """Lock the row in a new transaction; return False without waiting if another session has it."""
        await lock_conn.execute("begin")
        # A statement that waits for the row would hold a snapshot, and CREATE INDEX CONCURRENTLY would wait for its end.
        # Without arguments, execute() uses the simple protocol. The extended protocol would keep a snapshot until the commit.
        if await lock_conn.execute(LOCK_MIGRATOR_ROW) == "SELECT 1":
            return True
        await lock_conn.execute("rollback")
        return False

    def _report_blocked(self, blockers: Sequence[Blocker]) -> None:
        self._blockers = blockers
        for blocker in blockers:
            if blocker.pid not in self._reported_pids:
                self._reported_pids.add(blocker.pid)
                self._say(f"waiting: {blocker}")
