"""Which session holds the lock that another session waits for: asked on a connection of its own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from rota.db.pool import ROUTE_OF_COMMANDS, connect
from rota.db.salvage import LOST
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rota.db.connecting import Target
    from rota.db.pool import Connection

FIRST_LOOK_SECONDS = 0.3
"""Wait of this length before anything is asked: most locks are held for less."""

LOOK_EVERY_SECONDS = 1.0

LOOK_PATIENCE = 3.0
"""Seconds for connecting and for each question: this must not keep anything else waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """A session that others wait for. `waited`: seconds; `pid` 0: a prepared transaction."""

    waited: float
    object: str
    pid: int
    user_name: str | None
    application: str | None

    def __str__(self) -> str:
        return f"{session_name(self.pid, self.user_name, self.application)} holds a lock on {self.object}"

    @property
    def cure(self) -> str:
        """How to end it."""
        if self.pid == 0:
            return "commit or roll back what pg_prepared_xacts lists"
        return f"commit or roll back there, or run select pg_terminate_backend({self.pid})"


def session_name(pid: int, user_name: str | None, application: str | None) -> str:
    """Return how messages name a session."""
    if pid == 0:
        return "a prepared transaction"
    known = [f"user {user_name}"] if user_name else []
    known += [f"application {application[:64]}"] if application else []
    return f"pid {pid}" + (f" ({', '.join(known)})" if known else "")


async def find_blockers(db: Connection, *, pid: int | None, at_least: timedelta) -> list[Blocker]:
    """Return the sessions that `pid`, or all sessions of rota (None), have been waiting for; the longest wait first."""
    rows = await db.fetch(SQL["find_blockers"], pid, at_least, timeout=LOOK_PATIENCE)
    return [Blocker(**row) for row in rows]


async def find_row_locker(db: Connection, *, job_id: int | None = None, schedule_id: int | None = None) -> str | None:
    """Return the name of the session whose open transaction has the row of the live job, or of the schedule's clock, locked.

    None if there is none, or if this login may not read these rows.
    """
    try:
        row = await db.fetchrow(SQL["find_row_lockers"], job_id, schedule_id)
    except asyncpg.InsufficientPrivilegeError:
        return None
    return None if row is None else session_name(*row)


@asynccontextmanager
async def watching(
    target: Target, conn: asyncpg.Connection, *, on_blocked: Callable[[Sequence[Blocker]], None]
) -> AsyncIterator[None]:
    """Inside the block, call `on_blocked` once a second while `conn` waits for a lock of another session."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(target, conn.get_server_pid(), on_blocked))
            try:
                yield
            finally:
                watcher.cancel()
    except BaseExceptionGroup as errors:  # the watcher raises nothing: this is the error of the block
        error = errors.exceptions[0]
        raise error from error.__cause__


async def _watch(target: Target, pid: int, on_blocked: Callable[[Sequence[Blocker]], None]) -> None:
    await asyncio.sleep(FIRST_LOOK_SECONDS)
    # Best effort: a server that takes no further connection must not add a second error to the first.
    with suppress(*LOST, asyncpg.PostgresError, ValueError):
        db = await connect(target, route=ROUTE_OF_COMMANDS, name="rota lock watch", patience=LOOK_PATIENCE)
        try:
            while not db.is_closed():
                if found := await find_blockers(db, pid=pid, at_least=timedelta(0)):
                    on_blocked(found)
                await asyncio.sleep(LOOK_EVERY_SECONDS)
        finally:
            db.terminate()
