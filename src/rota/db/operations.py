"""The operators' actions: one typed function for each of rota's SQL functions that the commands call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.db.pool import Connection, fetch_one
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from rota.db.reports import DeadLetterFilter
    from rota.db.schedule_reports import ScheduleFilter

BATCH = 1000
"""Maximum rows per call, because a call is one transaction and keeps its locks to the end."""


async def cancel_job(db: Connection, *, job_id: int, force: bool, note: str | None) -> str:
    """Cancel a job; return 'cancelled', 'requested' (it is running) or 'finished'."""
    outcome: str = await db.fetchval(SQL["cancel_job"], job_id, force, note)
    return outcome


async def cancel_jobs(
    db: Connection, *, handler: str | None, queue: str | None, before: datetime | None, limit: int, note: str | None
) -> tuple[int, int]:
    """Cancel jobs; return how many were cancelled, and how many are running and got a request to cancel."""
    row = await fetch_one(db, SQL["cancel_jobs"], handler, queue, before, limit, note)
    return row[0], row[1]


async def reschedule_job(
    db: Connection, *, job_id: int, run_at: datetime | None, delay: timedelta | None, note: str | None
) -> datetime:
    """Change when a job is due; return its new run_at."""
    new_run_at: datetime = await db.fetchval(SQL["reschedule_job"], job_id, run_at, delay, note)
    return new_run_at


async def retry_jobs_now(
    db: Connection, *, handler: str | None, queue: str | None, limit: int, note: str | None
) -> int:
    """Make jobs that wait for a retry due now; return their number."""
    retried: int = await db.fetchval(SQL["retry_jobs_now"], handler, queue, limit, note)
    return retried


async def redrive_dead_letter(db: Connection, *, job_id: int, payload: str | None, note: str | None) -> None:
    """Make a dead letter a live job again. Raises server errors RT003, RT004 and RT005."""
    await db.execute(SQL["redrive_dead_letter"], job_id, payload, note)


async def redrive_dead_letters(
    db: Connection,
    *,
    which: DeadLetterFilter,
    limit: int,
    spread: timedelta | None,
    include_at_most_once: bool,
    note: str | None,
) -> tuple[int, int]:
    """Redrive dead letters; return how many were redriven, and how many were not because a live job has their key."""
    row = await fetch_one(db, SQL["redrive_dead_letters"], *which.values, limit, spread, include_at_most_once, note)
    return row[0], row[1]


async def discard_dead_letter(db: Connection, *, job_id: int, note: str) -> None:
    """Move a dead letter to the ledger. Raises server errors RT003 and RT004."""
    await db.execute(SQL["discard_dead_letter"], job_id, note)


async def discard_dead_letters(db: Connection, *, which: DeadLetterFilter, limit: int, note: str) -> int:
    """Move dead letters to the ledger; return their number."""
    discarded: int = await db.fetchval(SQL["discard_dead_letters"], *which.values, limit, note)
    return discarded


async def pause_queue(db: Connection, *, name: str, reason: str | None) -> bool:
    """Pause a queue; return whether it was running."""
    return bool(await db.fetchval(SQL["pause_queue"], name, reason))


async def resume_queue(db: Connection, *, name: str, reason: str | None) -> bool:
    """Resume a queue; return whether it was paused."""
    return bool(await db.fetchval(SQL["resume_queue"], name, reason))


async def pause_handler(db: Connection, *, name: str, reason: str | None) -> bool:
    """Pause a handler; return whether it was running."""
    return bool(await db.fetchval(SQL["pause_handler"], name, reason))


async def resume_handler(db: Connection, *, name: str, reason: str | None) -> bool:
    """Resume a handler; return whether it was paused."""
    return bool(await db.fetchval(SQL["resume_handler"], name, reason))


async def add_schedule(db: Connection, *, columns: str, payload: str | None) -> int | None:
    """Insert a schedule, with `columns` as a JSON object; return the schedule_id, or None if the name is taken."""
    schedule_id: int | None = await db.fetchval(SQL["add_schedule"], columns, payload)
    return schedule_id


async def edit_schedule(db: Connection, *, name: str, columns: str, payload: str | None) -> bool:
    """Change columns, given as a JSON object (null: the default); return whether the schedule exists."""
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
    """Pause a schedule; return whether it was running. Raises server error RT002."""
    paused: bool = await db.fetchval(SQL["pause_schedule"], name, resume_at, delay, cancel_live, reason)
    return paused


async def resume_schedule(db: Connection, *, name: str, reason: str | None) -> bool:
    """Resume a schedule; return whether it was paused. Raises server error RT002."""
    resumed: bool = await db.fetchval(SQL["resume_schedule"], name, reason)
    return resumed


async def pause_schedules(
    db: Connection, *, which: ScheduleFilter, resume_at: datetime | None, limit: int, reason: str | None
) -> int:
    """Pause a batch of schedules; return their number. 0 means that all remaining ones are locked."""
    paused: int = await db.fetchval(SQL["pause_schedules"], *which.values, resume_at, limit, reason)
    return paused


async def resume_schedules(
    db: Connection, *, which: ScheduleFilter, paused_since: datetime | None, limit: int, reason: str | None
) -> int:
    """Resume a batch of schedules; return their number. 0 means that all remaining ones are locked."""
    resumed: int = await db.fetchval(SQL["resume_schedules_by_filter"], *which.values, paused_since, limit, reason)
    return resumed


async def run_schedule_now(db: Connection, *, name: str, payload: str | None, reason: str | None) -> int:
    """Enqueue a job of the schedule now; return its job_id. Raises server error RT002."""
    job_id: int = await db.fetchval(SQL["run_schedule_now"], name, payload, reason)
    return job_id


async def remove_schedule(db: Connection, *, name: str, reason: str | None) -> None:
    """Delete a schedule; its fires and jobs stay. Raises server error RT002."""
    await db.execute(SQL["remove_schedule"], name, reason)


async def backfill_schedule(
    db: Connection, *, name: str, instants: Sequence[datetime], run_at: Sequence[datetime], reason: str | None
) -> tuple[int, int, int]:
    """Enqueue past instants; return how many were enqueued, had a fire already, or are not decided yet by the daemons."""
    row = await fetch_one(db, SQL["backfill_schedule"], name, instants, run_at, reason)
    return row[0], row[1], row[2]


async def forget_node(db: Connection, *, node_id: UUID, reason: str | None) -> bool:
    """Delete a lost node; return whether there was one. Raises server error RT004 if the node is alive."""
    forgotten: bool = await db.fetchval(SQL["forget_node"], node_id, reason)
    return forgotten
