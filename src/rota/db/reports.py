"""Read-only queries about jobs and dead letters: one typed function per SQL file. They take no locks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rota.db.pool import Connection, fetch_one
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID


MAX_COUNTED_JOBS = 200_000
"""A summary counts exactly up to this many live jobs."""

MAX_SEARCHED_LANES = 2_000
"""With more live jobs than that, a summary searches at most this many lanes."""

MAX_NAMED_LANES = 1000
"""A summary names at most this many lanes. It sums up the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """The state and settings of a job, without its payload and other values."""

    job_id: int
    handler: str
    queue: str
    state: str
    priority: int | None
    run_at: datetime | None
    scheduled_for: datetime
    attempt: int
    max_attempts: int
    losses: int | None
    releases: int | None
    delivery: str
    backoff_base: timedelta
    backoff_cap: timedelta
    retry_for: timedelta | None
    timeout: timedelta | None
    start_by: datetime | None
    unique_key: str | None
    schedule_id: int | None
    created_at: datetime | None
    created_by: str | None
    started_at: datetime | None
    finished_at: datetime | None
    node: UUID | None
    fence_token: int | None
    lease_expires_at: datetime | None
    cancel_requested: bool
    follow_up: bool
    """Whether new values with the same unique_key are queued behind the running job."""
    last_error_kind: str | None
    progress: float | None
    progress_note: str | None
    note: str | None
    limit_key: str | None
    paused: bool
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobValues:
    """The values of a job, as JSON text."""

    payload: str | None
    checkpoint: str | None
    meta: str | None
    result: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsuccessfulAttempt:
    """An attempt that did not succeed."""

    attempt: int
    fence_token: int
    node: UUID | None
    started_at: datetime | None
    finished_at: datetime
    outcome: str
    error_kind: str | None
    error: str | None
    redriven_at: datetime | None
    """When the dead letter of this attempt was redriven. The next two: by which user, and the dead letter's reason."""
    redriven_by: str | None
    dead_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """A job in a list."""

    job_id: int
    handler: str
    queue: str
    state: str
    priority: int | None
    run_at: datetime | None
    attempt: int
    max_attempts: int | None
    started_at: datetime | None
    finished_at: datetime | None
    last_error_kind: str | None
    schedule_id: int | None
    schedule: str | None
    """The schedule's name; None for no schedule, or one that was removed."""
    limit_key: str | None
    """None for finished jobs."""
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Selects dead letters. None matches everything. `before`: only letters that died before this instant."""

    handler: str | None = None
    queue: str | None = None
    reason: str | None = None
    error_kind: str | None = None
    before: datetime | None = None

    @property
    def values(self) -> tuple[str | None, str | None, str | None, str | None, datetime | None]:
        """The values for the first five parameters of the statements about dead letters."""
        return self.handler, self.queue, self.reason, self.error_kind, self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDeadLetter:
    """A dead letter in a list."""

    job_id: int
    handler: str
    queue: str
    reason: str
    error_kind: str | None
    attempt: int
    max_attempts: int | None
    delivery: str | None
    created_by: str
    started_at: datetime | None
    finished_at: datetime
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """Dead letters with the same handler, queue, reason and kind of error; `sample` is the job_id of the latest job."""

    handler: str
    queue: str
    reason: str
    error_kind: str | None
    letters: int
    at_most_once: int
    oldest: datetime
    newest: datetime
    sample: int
    now: datetime
    total: int
    """The number of all groups, listed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCounts:
    """The live jobs of one queue and handler, and of one priority if it is set. Counts may be lower bounds: see Backlog."""

    queue: str
    handler: str
    due: int
    running: int
    retrying: int
    future: int
    expired: int
    oldest_due: timedelta | None
    oldest_running: timedelta | None = None
    priority: int | None = None
    registered: bool = True
    """Whether a daemon has ever registered the handler."""
    limited: int = 0
    """Due jobs that a limit or hold applies to. They are not counted in `due` and `oldest_due`."""

    def __add__(self, other: LaneCounts) -> LaneCounts:
        """Return the sum of both, without a priority."""
        return replace(
            self,
            due=self.due + other.due,
            limited=self.limited + other.limited,
            running=self.running + other.running,
            retrying=self.retrying + other.retrying,
            future=self.future + other.future,
            expired=self.expired + other.expired,
            oldest_due=_longest(self.oldest_due, other.oldest_due),
            oldest_running=_longest(self.oldest_running, other.oldest_running),
            priority=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The live jobs by lane. Ages, expired leases and running jobs are exact at any number of jobs."""

    lanes: Sequence[LaneCounts]
    """One for each queue, handler and priority."""
    unnamed: Sequence[LaneCounts] = ()
    """Sums of the other lanes by priority, without a handler, and without a queue if no daemon serves it."""
    at_least: bool = False
    """Whether due, retrying and future are lower bounds, because there are too many jobs to count."""
    unexplored: bool = False
    """Whether some lanes of unregistered handlers were not counted, because there are too many."""
    more_lanes: int = 0
    """The number of lanes in `unnamed`."""
    more_queues: int = 0
    """The number of queues in the lanes without a queue."""

    @property
    def by_handler(self) -> list[LaneCounts]:
        """The named lanes, summed over priorities, in the order of their names."""
        merged: dict[tuple[str, str], LaneCounts] = {}
        for lane in self.lanes:
            key = lane.queue, lane.handler
            merged[key] = merged[key] + lane if key in merged else lane
        return list(merged.values())


def _longest(*ages: timedelta | None) -> timedelta | None:
    return max((age for age in ages if age is not None), default=None)


async def describe_job(db: Connection, *, job_id: int) -> JobDescription | None:
    """Return the state and settings of a job; None if the id is unknown."""
    row = await db.fetchrow(SQL["describe_job"], job_id)
    return None if row is None else JobDescription(**row)


async def read_job_values(db: Connection, *, job_id: int) -> JobValues | None:
    """Return the values of a job; None if the id is unknown."""
    row = await db.fetchrow(SQL["read_job_values"], job_id)
    return None if row is None else JobValues(**row)


async def list_attempts(db: Connection, *, job_id: int, with_errors: bool) -> list[UnsuccessfulAttempt]:
    """Return the job's attempts that did not succeed, newest first."""
    return [UnsuccessfulAttempt(**row) for row in await db.fetch(SQL["list_attempts"], job_id, with_errors)]


async def list_jobs(
    db: Connection,
    *,
    state: str | None,
    handler: str | None,
    queue: str | None,
    limit: int,
    schedule_id: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit_key: str | None = None,
) -> list[ListedJob]:
    """Return jobs, newest first. `since` and `until` apply to finished_at, or if it is running to started_at, else to run_at."""
    rows = await db.fetch(SQL["list_jobs"], state, handler, queue, schedule_id, since, until, limit, limit_key)
    return [ListedJob(**row) for row in rows]


async def list_dead_letters(db: Connection, *, which: DeadLetterFilter, limit: int) -> list[ListedDeadLetter]:
    """Return dead letters, oldest job first."""
    return [ListedDeadLetter(**row) for row in await db.fetch(SQL["list_dead_letters"], *which.values, limit)]


async def summarise_dead_letters(
    db: Connection, *, which: DeadLetterFilter, limit: int | None = None
) -> list[DeadLetterGroup]:
    """Return counts of dead letters, the most frequent group first. A limit of None returns all groups."""
    return [DeadLetterGroup(**row) for row in await db.fetch(SQL["summarise_dead_letters"], *which.values, limit)]


async def summarise_live_jobs(
    db: Connection, *, counted: int = MAX_COUNTED_JOBS, explored: int = MAX_SEARCHED_LANES, shown: int = MAX_NAMED_LANES
) -> Backlog:
    """Return the live jobs by lane. The SQL file explains the limits."""
    named: list[LaneCounts] = []
    unnamed: list[LaneCounts] = []
    totals: dict[str, Any] = {}
    for row in await db.fetch(SQL["summarise_live_jobs"], counted, explored, shown):
        values = dict(row)
        totals = {name: values.pop(name) for name in ("at_least", "unexplored", "more_lanes", "more_queues")}
        lanes = unnamed if values["handler"] is None else named
        lanes.append(LaneCounts(**values | {"queue": values["queue"] or "", "handler": values["handler"] or ""}))
    return Backlog(lanes=named, unnamed=unnamed, **totals)


async def count_live_jobs(
    db: Connection, *, handler: str | None, queue: str | None, before: datetime | None
) -> tuple[int, int]:
    """Return the numbers of scheduled and of running jobs."""
    row = await fetch_one(db, SQL["count_live_jobs"], handler, queue, before)
    return row[0], row[1]
