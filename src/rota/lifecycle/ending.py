"""End jobs that are not running: jobs that did not start in time, and jobs with a request to cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rota.db import queries
from rota.db.salvage import salvage_selected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import asyncpg

    from rota.db.pool import Connection
    from rota.observability.telemetry import Telemetry

BATCH = 500


async def expire_unstarted_jobs(db: Connection, telemetry: Telemetry) -> list[asyncpg.Record]:
    """End jobs that did not start in time; return (job_id, handler, queue, schedule_id) of each."""

    async def expire(only: Sequence[int] | None) -> list[asyncpg.Record]:
        return await queries.expire_unstarted_jobs(db, limit=BATCH, only=only)

    expired = await _end(db, telemetry, "expire", expire)
    telemetry.jobs_ended("expired", len(expired))
    return expired


async def cancel_waiting_jobs(db: Connection, telemetry: Telemetry) -> None:
    """Cancel waiting jobs that have a request to cancel."""

    async def cancel(only: Sequence[int] | None) -> list[asyncpg.Record]:
        return await queries.answer_cancel_requests(db, limit=BATCH, only=only)

    telemetry.jobs_ended("cancelled", len(await _end(db, telemetry, "cancel", cancel)))


async def _end(
    db: Connection,
    telemetry: Telemetry,
    doing: Literal["expire", "cancel"],
    end: Callable[[Sequence[int] | None], Awaitable[list[asyncpg.Record]]],
) -> list[asyncpg.Record]:
    async def find() -> Sequence[int]:
        return list(await queries.find_salvage_rows(db, doing=doing, limit=BATCH))

    async def refuse(job_id: int, error: Exception) -> list[asyncpg.Record]:
        telemetry.row_refused(doing, error, job_id=job_id)
        return []

    return [job for ended in await salvage_selected(end, find, refuse) for job in ended]
