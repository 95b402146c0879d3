"""Read-only queries about schedules and their fires: one typed function per SQL file. They take no locks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Unpack

from rota.db.pool import Connection, fetch_one
from rota.db.schedule_queries import DueSchedulesQuery, arguments_of
from rota.db.sql import SQL
from rota.domain.schedule import Rule

if TYPE_CHECKING:
    from datetime import datetime

    from rota.cron import Fold, Gap
    from rota.domain.schedule import Misfire, Overlap

CROWD_SIZE = 1000
"""Rota warns if more schedules without jitter than this share an instant."""

MAX_MANUAL_FIRES = 10_000
"""How many later fires to search for the range that covers an instant. Only manual runs and backfills lie in between."""

SEARCHED_FIRES = 200_000
"""How many of the latest fires to search for the name of a removed schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSchedule:
    """A schedule in a list. `silent`: without a success within `expect_success_within`."""

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
    """All columns of a schedule; payload, meta and declared are JSON text."""

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
    limit_key: str | None
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
    """This and pause_reason come from the audit: None for logins that may not read the audit."""
    pause_reason: str | None = None

    @property
    def rule(self) -> Rule:
        """The rule from which the instants are computed."""
        return Rule(
            cron=self.cron,
            every=self.every,
            anchor=None if self.every is None else self.start_at or self.created_at,
            timezone=self.timezone,
            # An interval that counts from the creation does not fire at the creation itself.
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
    """The fire of an instant, or of a range of missed instants. `job_state`: None without a job, or if its history was pruned."""

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
    """A schedule and its next fire."""

    name: str
    handler: str
    next_fire_at: datetime
    timezone: str
    jitter: timedelta
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """An instant that many schedules without jitter share, and the first of their names.

    `next_fire_at` is None for schedules that are not planned yet. These share the cron expression.
    """

    next_fire_at: datetime | None
    cron: str | None
    schedules: int
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFilter:
    """Selects schedules. None matches everything; `name_like` is a LIKE pattern."""

    handler: str | None = None
    owner: str | None = None
    name_like: str | None = None

    @property
    def values(self) -> tuple[str | None, str | None, str | None]:
        """The values for the first three parameters of the statements about many schedules."""
        return self.handler, self.owner, self.name_like


async def list_schedules(
    db: Connection, *, which: ScheduleFilter, state: str | None, limit: int
) -> list[ListedSchedule]:
    """Return schedules in the order of their names. `state` is a state of rota.schedules, or silent."""
    query = SQL["list_schedules"] if state in (None, "ok") else SQL["list_odd_schedules"]
    rows = await db.fetch(query, which.handler, state, which.owner, which.name_like, limit)
    return [ListedSchedule(**row) for row in rows]


async def count_schedules(
    db: Connection, *, which: ScheduleFilter, paused_since: datetime | None = None
) -> tuple[int, int]:
    """Return the numbers of running schedules, and of those paused (since `paused_since`)."""
    row = await fetch_one(db, SQL["count_schedules"], *which.values, paused_since)
    return row[0], row[1]


async def list_schedule_names(db: Connection, *, limit: int) -> list[str]:
    """Return the names of schedules in alphabetical order."""
    return [row[0] for row in await db.fetch(SQL["list_schedule_names"], limit)]


async def describe_schedule(db: Connection, *, name: str) -> ScheduleDescription | None:
    """Return all columns of a schedule; None if there is none of that name."""
    row = await db.fetchrow(SQL["describe_schedule"], name)
    return None if row is None else ScheduleDescription(**row)


async def find_pause(db: Connection, *, name: str, since: datetime) -> tuple[str | None, str | None]:
    """Return which user paused the schedule since then, and the reason; None if the audit does not contain it."""
    row = await db.fetchrow(SQL["find_pause"], name, since)
    return (None, None) if row is None else (row[0], row[1])


async def list_fires(db: Connection, *, schedule_id: int, limit: int) -> list[FireRecord]:
    """Return the fires of a schedule, the latest first."""
    return [FireRecord(**row) for row in await db.fetch(SQL["list_fires"], schedule_id, limit)]


async def find_fire(db: Connection, *, schedule_id: int, at: datetime) -> FireRecord | None:
    """Return the fire of the instant, else the fire of the range of missed instants that covers it."""
    row = await db.fetchrow(SQL["find_fire"], schedule_id, at, MAX_MANUAL_FIRES)
    return None if row is None else FireRecord(**row)


async def find_removed_schedule(db: Connection, *, name: str) -> int | None:
    """Return the schedule_id of a removed schedule; None if it is not among the latest fires of all schedules."""
    schedule_id: int | None = await db.fetchval(SQL["find_removed_schedule"], name, SEARCHED_FIRES)
    return schedule_id


async def find_job_fire(db: Connection, *, job_id: int, schedule_id: int, scheduled_for: datetime) -> FireRecord | None:
    """Return the fire that created the job."""
    row = await db.fetchrow(SQL["find_job_fire"], job_id, schedule_id, scheduled_for)
    return None if row is None else FireRecord(**row)


async def list_next_fires(db: Connection, *, limit: int) -> list[NextFire]:
    """Return the schedules that fire next, the soonest first."""
    return [NextFire(**row) for row in await db.fetch(SQL["list_next_fires"], limit)]


async def summarise_schedules(db: Connection) -> dict[str, int]:
    """Return state -> number of schedules. Silent schedules are counted a second time, as `silent`."""
    return {row[0]: row[1] for row in await db.fetch(SQL["summarise_schedules"]) if row[1]}


async def find_crowds(db: Connection) -> list[Crowd]:
    """Return the next instants that more than CROWD_SIZE schedules without jitter share."""
    return [Crowd(**row) for row in await db.fetch(SQL["find_crowds"], CROWD_SIZE)]


async def find_schedules_ahead(db: Connection, *, limit: int) -> list[tuple[str, datetime]]:
    """Return (name, last decided instant) of schedules that have already decided future instants."""
    return [(row["name"], row["decided_up_to"]) for row in await db.fetch(SQL["find_schedules_ahead"], limit)]


async def count_crowd(db: Connection, *, at: datetime, cron: str | None, timezone: str) -> int:
    """Return how many schedules without jitter fire at the instant; unplanned ones count if they have this cron and timezone."""
    count: int = await db.fetchval(SQL["count_crowd"], at, cron, timezone)
    return count


async def count_pages_read(db: Connection, **query: Unpack[DueSchedulesQuery]) -> int:
    """Run `take_due_schedules` with EXPLAIN; return how many pages it reads."""
    explained = "explain (analyze, buffers, format json) " + SQL["take_due_schedules"]
    text: str = await db.fetchval(explained, *arguments_of(query))
    plan = json.loads(text)[0]["Plan"]
    pages: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return pages
