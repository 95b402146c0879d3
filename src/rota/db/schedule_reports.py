"""What people ask about schedules and their fires: one typed function for each reading file in sql/queries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Unpack

from rota.db.schedule_queries import Look, arguments_of
from rota.db.sql import SQL
from rota.domain.schedule import Rule

if TYPE_CHECKING:
    from datetime import datetime

    from rota.cron import Fold, Gap
    from rota.db.pool import Connection
    from rota.domain.schedule import Misfire, Overlap

CROWD = 1000
"""Schedules that may share an instant without jitter before somebody is told."""

BY_HAND = 10_000
"""Among how many rows after an instant its stretch is looked for: within a stretch lie runs and backfills asked for by hand."""

LAST_FIRES = 200_000
"""Among how many fires a schedule that is gone is looked for by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLine:
    """A schedule in a list. `silent`: no success within `expect_success_within`."""

    schedule_id: int
    name: str
    cron: str | None
    every: timedelta | None
    timezone: str
    handler: str
    owner: str | None
    state: str
    next_fire_at: datetime | None
    last_fire_at: datetime | None
    last_success_at: datetime | None
    consecutive_failures: int
    expect_success_within: timedelta | None
    silent: bool | None
    jitter: timedelta
    declared_by: str | None
    invalid_reason: str | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDescription:
    """Everything about a schedule; payload, meta and declared as JSON text."""

    schedule_id: int
    name: str
    cron: str | None
    every: timedelta | None
    timezone: str
    handler: str
    payload: str
    queue: str | None
    priority: int
    max_attempts: int | None
    backoff_base: timedelta | None
    backoff_cap: timedelta | None
    retry_for: timedelta | None
    timeout: timedelta | None
    lease: timedelta | None
    delivery: str | None
    start_within: timedelta | None
    meta: str | None
    start_at: datetime | None
    end_at: datetime | None
    paused: bool
    resume_at: datetime | None
    misfire: Misfire
    on_time_within: timedelta
    too_late_after: timedelta | None
    catch_up_limit: int
    overlap: Overlap
    dst_gap: Gap
    dst_fold: Fold
    jitter: timedelta
    description: str | None
    owner: str | None
    declared_by: str | None
    declared: str | None
    expect_success_within: timedelta | None
    created_at: datetime
    created_by: str
    edited_at: datetime
    paused_at: datetime | None
    next_fire_at: datetime | None
    last_fire_at: datetime | None
    last_success_at: datetime | None
    consecutive_failures: int
    invalid_reason: str | None
    state: str
    silent: bool | None
    jitter_offset: timedelta
    now: datetime
    paused_by: str | None = None
    """Known to those who may read the audit, as is why."""
    pause_reason: str | None = None

    @property
    def rule(self) -> Rule:
        """When it fires."""
        return Rule(
            cron=self.cron,
            every=self.every,
            anchor=None if self.every is None else self.start_at or self.created_at,
            timezone=self.timezone,
            # What counts from the creation has no instant at it.
            start_at=self.start_at or (None if self.every is None else self.created_at + timedelta(microseconds=1)),
            end_at=self.end_at,
            dst_gap=self.dst_gap,
            dst_fold=self.dst_fold,
            misfire=self.misfire,
            on_time_within=self.on_time_within,
            too_late_after=self.too_late_after,
            catch_up_limit=self.catch_up_limit,
            overlap=self.overlap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FireRecord:
    """What became of an instant, or of a stretch of them, and of its job (None: no job, or it ended long ago)."""

    schedule_id: int
    name: str
    scheduled_for: datetime
    disposition: str
    decided_at: datetime
    job_id: int | None
    job_state: str | None
    missed_from: datetime | None
    missed_count: int | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextFire:
    """A schedule and when it fires next."""

    name: str
    handler: str
    next_fire_at: datetime
    timezone: str
    jitter: timedelta
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """An instant that many schedules without jitter share, and the first of their names. Not planned yet: only the expression."""

    next_fire_at: datetime | None
    cron: str | None
    schedules: int
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFilter:
    """Selects schedules; None selects all. `name_like` is a pattern of LIKE."""

    handler: str | None = None
    owner: str | None = None
    name_like: str | None = None

    @property
    def values(self) -> tuple[str | None, str | None, str | None]:
        """The first three parameters of the statements that act on many schedules."""
        return self.handler, self.owner, self.name_like


async def list_schedules(db: Connection, *, which: ScheduleFilter, state: str | None, limit: int) -> list[ScheduleLine]:
    """Return schedules by name; `state` may be silent, too."""
    query = SQL["list_schedules"] if state in (None, "ok") else SQL["list_odd_schedules"]
    rows = await db.fetch(query, which.handler, state, which.owner, which.name_like, limit)
    return [ScheduleLine(**row) for row in rows]


async def count_schedules(
    db: Connection, *, which: ScheduleFilter, paused_since: datetime | None = None
) -> tuple[int, int]:
    """Return how many are not paused, and how many are (since then)."""
    row = await db.fetchrow(SQL["count_schedules"], *which.values, paused_since)
    assert row is not None  # noqa: S101  an aggregate
    return row[0], row[1]


async def list_schedule_names(db: Connection, *, limit: int) -> list[str]:
    """Return names of schedules."""
    return [row[0] for row in await db.fetch(SQL["list_schedule_names"], limit)]


async def describe_schedule(db: Connection, *, name: str) -> ScheduleDescription | None:
    """Return everything about a schedule; None where there is none of that name."""
    row = await db.fetchrow(SQL["describe_schedule"], name)
    return None if row is None else ScheduleDescription(**row)


async def find_pause(db: Connection, *, name: str, since: datetime) -> tuple[str | None, str | None]:
    """Return who has paused it since, and why; None where nobody said."""
    row = await db.fetchrow(SQL["find_pause"], name, since)
    return (None, None) if row is None else (row[0], row[1])


async def list_fires(db: Connection, *, schedule_id: int, limit: int) -> list[FireRecord]:
    """Return what became of its instants, the last ones first."""
    return [FireRecord(**row) for row in await db.fetch(SQL["list_fires"], schedule_id, limit)]


async def find_fire(db: Connection, *, schedule_id: int, at: datetime) -> FireRecord | None:
    """Return the row that tells of that instant: its own, else that of the stretch it is in."""
    row = await db.fetchrow(SQL["find_fire"], schedule_id, at, BY_HAND)
    return None if row is None else FireRecord(**row)


async def find_removed_schedule(db: Connection, *, name: str) -> int | None:
    """Return the schedule_id of a schedule that is gone; None where it isn't among the last fires of all schedules."""
    found: int | None = await db.fetchval(SQL["find_removed_schedule"], name, LAST_FIRES)
    return found


async def find_job_fire(db: Connection, *, job_id: int, schedule_id: int, scheduled_for: datetime) -> FireRecord | None:
    """Return the fire that the job was made for."""
    row = await db.fetchrow(SQL["find_job_fire"], job_id, schedule_id, scheduled_for)
    return None if row is None else FireRecord(**row)


async def list_next_fires(db: Connection, *, limit: int) -> list[NextFire]:
    """Return which schedules fire next, the soonest first."""
    return [NextFire(**row) for row in await db.fetch(SQL["list_next_fires"], limit)]


async def summarise_schedules(db: Connection) -> dict[str, int]:
    """Return state -> how many; silent ones once more under that name."""
    return {row[0]: row[1] for row in await db.fetch(SQL["summarise_schedules"]) if row[1]}


async def find_crowds(db: Connection) -> list[Crowd]:
    """Return the next instants that too many schedules without jitter share."""
    return [Crowd(**row) for row in await db.fetch(SQL["find_crowds"], CROWD)]


async def find_schedules_ahead(db: Connection, *, limit: int) -> list[tuple[str, datetime]]:
    """Return (name, decided up to) of schedules that have decided about instants which are yet to come."""
    return [(row["name"], row["decided_up_to"]) for row in await db.fetch(SQL["find_schedules_ahead"], limit)]


async def count_crowd(db: Connection, *, at: datetime, cron: str | None, timezone: str) -> int:
    """Return how many schedules without jitter fire at that instant; those not planned yet if they are alike."""
    count: int = await db.fetchval(SQL["count_crowd"], at, cron, timezone)
    return count


async def count_pages_of_a_look(db: Connection, **look: Unpack[Look]) -> int:
    """Return how many pages one `take_due_schedules` reads, by its plan."""
    explained = "explain (analyze, buffers, format json) " + SQL["take_due_schedules"]
    text: str = await db.fetchval(explained, *arguments_of(look))
    plan = json.loads(text)[0]["Plan"]
    pages: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return pages
