"""Find the session that holds the lock for which another session waits. Uses a connection of its own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from rota.db.pool import connect
from rota.db.salvage import LOST
from rota.db.sessions import ROUTE_OF_COMMANDS
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rota.db.connecting import Target
    from rota.db.pool import Connection

FIRST_CHECK_SECONDS = 0.3
"""Delay before the first check, because most locks are held for less."""

CHECK_EVERY_SECONDS = 1.0

CHECK_TIMEOUT_SECONDS = 3.0
"""Limit for connecting and for each query. A check that takes longer must not delay its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """A session that blocks others. `waited` is in seconds; `pid` is 0 for a prepared transaction."""

    waited: float
    object: str
    pid: int
    user_name: str | None
    application: str | None

    def __str__(self) -> str:
        return f"{session_name(self.pid, self.user_name, self.application)} holds a lock on {self.object}"

    @property
    def cure(self) -> str:
        """How an operator can release the lock."""
        if self.pid == 0:
            return "commit or roll back the transactions in pg_prepared_xacts"
        return f"commit or roll back there, or run select pg_terminate_backend({self.pid})"


def session_name(pid: int, user_name: str | None, application: str | None) -> str:
    """Return the description of a session for messages."""
    if pid == 0:
        return "a prepared transaction"
    details = [f"user {user_name}"] if user_name else []
    details += [f"application {application[:64]}"] if application else []
    return f"pid {pid}" + (f" ({', '.join(details)})" if details else "")


async def find_blockers(db: Connection, *, pid: int | None, at_least: timedelta) -> list[Blocker]:
    """Return the sessions that have blocked `pid`, or any session of rota if None, for `at_least` that long; longest wait first."""
    rows = await db.fetch(SQL["find_blockers"], pid, at_least, timeout=CHECK_TIMEOUT_SECONDS)
    return [Blocker(**row) for row in rows]


async def find_row_locker(db: Connection, *, job_id: int | None = None, schedule_id: int | None = None) -> str | None:
    """Return the description of the session that has the row of the live job or of the schedule's clock locked.

    None if there is none, or if this login may not read these rows.
    """
    try:
        row = await db.fetchrow(SQL["find_row_lockers"], job_id, schedule_id)
    except asyncpg.InsufficientPrivilegeError:
        return None
    return None if row is None else session_name(*row)


@asynccontextmanager
async def report_blockers(
    target: Target, conn: asyncpg.Connection, *, on_blocked: Callable[[Sequence[Blocker]], None]
) -> AsyncIterator[None]:
    """Inside the block, call `on_blocked` every second while `conn` waits for another session's lock."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(target, conn.get_server_pid(), on_blocked))
            try:
                yield
            finally:
                watcher.cancel()
    except BaseExceptionGroup as errors:  # the watcher raises nothing, so this is the block's own error
        error = errors.exceptions[0]
        raise error from error.__cause__


async def _watch(target: Target, pid: int, on_blocked: Callable[[Sequence[Blocker]], None]) -> None:
    await asyncio.sleep(FIRST_CHECK_SECONDS)
    # Best effort: if the server accepts no further connection, report nothing instead of raising a second error.
    with suppress(*LOST, asyncpg.PostgresError, ValueError):
        db = await connect(target, route=ROUTE_OF_COMMANDS, name="rota lock watch", patience=CHECK_TIMEOUT_SECONDS)
        try:
            while not db.is_closed():
                if blockers := await find_blockers(db, pid=pid, at_least=timedelta(0)):
                    on_blocked(blockers)
                await asyncio.sleep(CHECK_EVERY_SECONDS)
        finally:
            db.terminate()
