"""What operators do: one typed function for each of rota's SQL functions that the commands call. Nothing here but the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from rota.db.pool import Connection
    from rota.db.reports import LetterFilter
    from rota.db.schedule_reports import ScheduleFilter

BATCH = 1000
"""Most rows of one call, which is one transaction and keeps its locks to the end."""


async def cancel_job(db: Connection, *, job_id: int, force: bool, note: str | None) -> str:
    """Return 'cancelled', 'requested' or 'finished'."""
    became: str = await db.fetchval(SQL["cancel_job"], job_id, force, note)
    return became


async def cancel_jobs(
    db: Connection, *, handler: str | None, queue: str | None, before: datetime | None, limit: int, note: str | None
) -> tuple[int, int]:
    """Return how many were cancelled, and how many run and were asked to stop."""
    row = await db.fetchrow(SQL["cancel_jobs"], handler, queue, before, limit, note)
    assert row is not None  # noqa: S101  a set-returning function that returns one row
    return row[0], row[1]


async def reschedule_job(
    db: Connection, *, job_id: int, run_at: datetime | None, delay: timedelta | None, note: str | None
) -> datetime:
    """Return when the job is due now."""
    due: datetime = await db.fetchval(SQL["reschedule_job"], job_id, run_at, delay, note)
    return due


async def retry_jobs_now(
    db: Connection, *, handler: str | None, queue: str | None, limit: int, note: str | None
) -> int:
    """Return how many waited for their retry and are due now."""
    woken: int = await db.fetchval(SQL["retry_jobs_now"], handler, queue, limit, note)
    return woken


async def redrive_dead_letter(db: Connection, *, job_id: int, payload: str | None, note: str | None) -> None:
    """Send it back. Raises the server's RT003, RT004, RT005."""
    await db.execute(SQL["redrive_dead_letter"], job_id, payload, note)


async def redrive_dead_letters(
    db: Connection,
    *,
    which: LetterFilter,
    limit: int,
    spread: timedelta | None,
    include_at_most_once: bool,
    note: str | None,
) -> tuple[int, int]:
    """Return how many went, and how many were left out because a live job has their key."""
    row = await db.fetchrow(SQL["redrive_dead_letters"], *which.values, limit, spread, include_at_most_once, note)
    assert row is not None  # noqa: S101  a set-returning function that returns one row
    return row[0], row[1]


async def discard_dead_letter(db: Connection, *, job_id: int, note: str) -> None:
    """End it. Raises the server's RT003, RT004."""
    await db.execute(SQL["discard_dead_letter"], job_id, note)


async def discard_dead_letters(db: Connection, *, which: LetterFilter, limit: int, note: str) -> int:
    """Return how many were ended."""
    ended: int = await db.fetchval(SQL["discard_dead_letters"], *which.values, limit, note)
    return ended


async def pause_queue(db: Connection, *, name: str, reason: str | None) -> bool:
    """Return whether that changed anything."""
    return bool(await db.fetchval(SQL["pause_queue"], name, reason))


async def resume_queue(db: Connection, *, name: str, reason: str | None) -> bool:
    """Return whether that changed anything."""
    return bool(await db.fetchval(SQL["resume_queue"], name, reason))


async def pause_handler(db: Connection, *, name: str, reason: str | None) -> bool:
    """Return whether that changed anything."""
    return bool(await db.fetchval(SQL["pause_handler"], name, reason))


async def resume_handler(db: Connection, *, name: str, reason: str | None) -> bool:
    """Return whether that changed anything."""
    return bool(await db.fetchval(SQL["resume_handler"], name, reason))


async def add_schedule(db: Connection, *, columns: str, payload: str | None) -> int | None:
    """Take columns as a JSON object; return the schedule_id, None where there is one of that name."""
    made: int | None = await db.fetchval(SQL["add_schedule"], columns, payload)
    return made


async def edit_schedule(db: Connection, *, name: str, columns: str, payload: str | None) -> bool:
    """Take what is to change as a JSON object (null: the default); return whether there is such a schedule."""
    return await db.fetchval(SQL["edit_schedule"], name, columns, payload) is not None


async def pause_schedule(
    db: Connection,
    *,
    name: str,
    resume_at: datetime | None,
    delay: timedelta | None,
    cancel_live: bool,
    reason: str | None,
) -> bool:
    """Return whether that changed anything. Raises the server's RT002."""
    changed: bool = await db.fetchval(SQL["pause_schedule"], name, resume_at, delay, cancel_live, reason)
    return changed


async def resume_schedule(db: Connection, *, name: str, reason: str | None) -> bool:
    """Return whether it was paused. Raises the server's RT002."""
    changed: bool = await db.fetchval(SQL["resume_schedule"], name, reason)
    return changed


async def pause_schedules(
    db: Connection, *, which: ScheduleFilter, resume_at: datetime | None, limit: int, reason: str | None
) -> int:
    """Return how many were paused by this call; 0 when none is left that isn't locked."""
    changed: int = await db.fetchval(SQL["pause_schedules"], *which.values, resume_at, limit, reason)
    return changed


async def resume_schedules(
    db: Connection, *, which: ScheduleFilter, paused_since: datetime | None, limit: int, reason: str | None
) -> int:
    """Return how many were resumed by this call; 0 when none is left that isn't locked."""
    changed: int = await db.fetchval(SQL["resume_schedules_by_filter"], *which.values, paused_since, limit, reason)
    return changed


async def run_schedule_now(db: Connection, *, name: str, payload: str | None, reason: str | None) -> int:
    """Return the job_id. Raises the server's RT002."""
    job_id: int = await db.fetchval(SQL["run_schedule_now"], name, payload, reason)
    return job_id


async def remove_schedule(db: Connection, *, name: str, reason: str | None) -> None:
    """Remove it; its history stays. Raises the server's RT002."""
    await db.execute(SQL["remove_schedule"], name, reason)


async def backfill_schedule(
    db: Connection, *, name: str, instants: Sequence[datetime], run_at: Sequence[datetime], reason: str | None
) -> tuple[int, int, int]:
    """Return how many instants were enqueued, left out because they had a row, and left to the daemons as not decided yet."""
    row = await db.fetchrow(SQL["backfill_schedule"], name, instants, run_at, reason)
    assert row is not None  # noqa: S101  a function with OUT parameters
    return row[0], row[1], row[2]


async def forget_node(db: Connection, *, node_id: UUID, reason: str | None) -> bool:
    """Return whether it was listed as lost, and is no longer. Raises the server's RT004 for one that is alive."""
    forgotten: bool = await db.fetchval(SQL["forget_node"], node_id, reason)
    return forgotten
