"""Queries about limits: the rows of rota.limits, and what their keys run and wait for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import asyncpg

from rota.db.sql import SQL
from rota.domain.declaration import StoredSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from rota.db.pool import Connection
    from rota.db.reports import JobDescription
    from rota.domain.declaration import Step

MAX_COUNTED_WAITERS = 1000
"""Jobs that wait for a limit are counted up to this number."""

MAX_WALKED_KEYS = 1000
"""`list_limits` looks at most at this many combinations of queue, priority, key and handler."""

MAX_HOLDERS = 5
"""Number of running jobs of a key whose ids are read."""

SHARED_PREFIXES = ("handler:", "queue:")
"""A key with one of these beginnings limits all jobs of a handler or queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """The limit that applies to a key, and what the key has used of it."""

    key: str
    applies: str | None
    """The key of the limit: the same, or one that ends in `*`. None: no limit applies, but the key may be held."""
    max_running: int | None
    max_starts: int | None
    per: timedelta | None
    weight: int | None
    note: str | None
    declared_by: str | None
    changed_at: datetime | None
    held_until: datetime | None
    """None unless the key is held now."""
    hold_reason: str | None
    running: int
    holders: Sequence[int]
    """Ids of running jobs, at most MAX_HOLDERS."""
    starts_left: int | None
    next_start_at: datetime | None
    """When the next start is possible. None if one is possible now."""
    now: datetime

    @property
    def is_open(self) -> bool:
        """Whether a job of the key may start now."""
        return (
            self.held_until is None
            and (self.max_running is None or self.running < self.max_running)
            and self.next_start_at is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimit:
    """A limit that applies to a due job, and the number of jobs that start before it. `more`: `ahead` is a lower bound."""

    state: LimitState
    ahead: int
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLimit:
    """A limit in a list, or a held key without a limit of its own. `more`: `waiting` is a lower bound."""

    key: str
    is_limit: bool
    max_running: int | None
    max_starts: int | None
    per: timedelta | None
    weight: int | None
    note: str | None
    declared_by: str | None
    changed_at: datetime
    held_until: datetime | None
    hold_reason: str | None
    running: int
    waiting: int
    more: bool
    total: int
    """The number of all limits and holds, listed or not."""
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitProblem:
    """A limit that stops its jobs for long, is of an unknown handler or queue, or has more running jobs than it allows."""

    kind: Literal["stopped", "unknown", "over"]
    key: str
    applies: str
    max_running: int | None
    running: int
    changed_at: datetime
    note: str | None
    last_start_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWaiter:
    """A due job whose key has a permit and a start left."""

    job_id: int
    queue: str
    handler: str
    limit_key: str
    waited: timedelta


async def find_limit_problems(db: Connection, *, stopped_for: timedelta, limit: int) -> list[LimitProblem]:
    """Return limits with a problem."""
    problems = [LimitProblem(**row) for row in await db.fetch(SQL["find_limit_problems"], stopped_for, limit)]
    return [each for each in problems if each.kind != "over" or not await _was_limit_removed(db, each)]


async def _was_limit_removed(db: Connection, problem: LimitProblem) -> bool:
    """Return whether a limit with the exact key was removed since the last start. False if the login may not read the audit."""
    try:
        return bool(await db.fetchval(SQL["was_limit_removed"], problem.key, problem.last_start_at))
    except asyncpg.InsufficientPrivilegeError:
        return False


async def find_open_waiters(db: Connection, *, older: timedelta) -> list[OpenWaiter]:
    """Return due jobs whose key is open, and whose handler and queue have no closed limit."""
    waiters = [OpenWaiter(**row) for row in await db.fetch(SQL["find_open_waiters"], MAX_WALKED_KEYS, older)]
    shared = {key for each in waiters for key in (f"handler:{each.handler}", f"queue:{each.queue}")}
    closed = {state.key for state in await describe_limits(db, keys=sorted(shared)) if not state.is_open}
    return [each for each in waiters if closed.isdisjoint((f"handler:{each.handler}", f"queue:{each.queue}"))]


async def find_unlimited_keys(db: Connection, *, limit: int) -> list[str]:
    """Return keys of due jobs to which no limit applies."""
    return [row[0] for row in await db.fetch(SQL["find_unlimited_keys"], MAX_WALKED_KEYS, limit)]


async def list_limits(db: Connection, *, limit: int) -> list[ListedLimit]:
    """Return limits and held keys in the order of their keys, with their running and waiting jobs."""
    rows = await db.fetch(SQL["list_limits"], limit, MAX_COUNTED_WAITERS, MAX_WALKED_KEYS)
    return [ListedLimit(**row) for row in rows]


async def describe_limits(db: Connection, *, keys: Sequence[str]) -> list[LimitState]:
    """Return the state of each key."""
    return [LimitState(**row) for row in await db.fetch(SQL["describe_limits"], keys, MAX_HOLDERS)]


async def count_limit_waiters(db: Connection, *, key: str, job: JobDescription | None = None) -> tuple[int, bool]:
    """Return the number of due jobs of the key, or of those that start before a job, and whether it is a lower bound."""
    place: tuple[Any, ...] = (None, None, None, None)
    if job is not None:
        place = (job.priority, job.run_at, job.job_id, job.queue if key.startswith(SHARED_PREFIXES) else None)
    count: int = await db.fetchval(SQL["count_limit_waiters"], key, *place, MAX_COUNTED_WAITERS + 1)
    return min(count, MAX_COUNTED_WAITERS), count > MAX_COUNTED_WAITERS


async def find_job_limits(db: Connection, *, job: JobDescription) -> list[JobLimit]:
    """Return the limits and holds that apply to a due job: those of its key, its handler and its queue."""
    keys = [f"handler:{job.handler}", f"queue:{job.queue}"]
    states = await describe_limits(db, keys=keys if job.limit_key is None else [job.limit_key, *keys])
    limits = []
    for state in states:
        if state.applies is not None or state.held_until is not None:
            ahead, more = await count_limit_waiters(db, key=state.key, job=job)
            limits.append(JobLimit(state=state, ahead=ahead, more=more))
    return limits


async def change_limit(db: Connection, *, key: str, columns: Mapping[str, Any]) -> bool:
    """Change these columns of a limit (None: no such limit), or insert it; return whether it was inserted."""
    return bool(await db.fetchval(SQL["change_limit"], key, json.dumps(columns)))


async def hold_limit(
    db: Connection, *, key: str, until: datetime | None, length: timedelta | None, reason: str | None
) -> datetime | None:
    """Hold a key until an instant or for some time, or end its hold if both are None; return the end of the hold."""
    end: datetime | None = await db.fetchval(SQL["hold_limit"], key, until, length, reason)
    return end


async def read_declared_limits(db: Connection, *, app: str, names: Sequence[str]) -> list[StoredSchedule]:
    """Return the limits that the app has declared, and all limits with these keys."""
    return [StoredSchedule(**row) for row in await db.fetch(SQL["read_declared_limits"], app, names)]


async def apply_limit_declarations(db: Connection, *, app: str, steps: Sequence[Step]) -> set[str]:
    """Carry out the inserts and edits; return the keys of the limits written. The others have changed since they were read."""
    inserts = [{"columns": step.columns, "declared": step.declared} for step in steps if step.what == "inserted"]
    edits = [
        {"name": step.name, "expected": step.expected, "columns": step.columns, "declared": step.declared}
        for step in steps
        if step.writes and step.what != "inserted"
    ]
    rows = await db.fetch(SQL["apply_limit_declarations"], app, json.dumps(inserts), json.dumps(edits))
    return {row[0] for row in rows}


async def remove_limit(db: Connection, key: str) -> bool:
    """Delete a limit; return whether it existed."""
    return bool(await db.fetchval(SQL["remove_limit"], key))
