"""The daemon's queries about schedules, in the order of a fire's life: one typed function per SQL file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from rota.db.pool import Connection, fetch_one
from rota.db.sql import SQL
from rota.domain.declaration import StoredSchedule
from rota.domain.schedule import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import asyncpg

    from rota.domain.declaration import Step

DISTANT_PAST = datetime.min.replace(tzinfo=UTC)
"""The driver sends this as -infinity."""

DISTANT_FUTURE = datetime.max.replace(tzinfo=UTC)
"""The driver sends this as infinity."""

RULE_COLUMNS = (
    "cron",
    "every",
    "anchor",
    "timezone",
    "start_at",
    "end_at",
    "dst_gap",
    "dst_fold",
    "misfire",
    "on_time_within",
    "too_late_after",
    "catch_up_limit",
    "overlap",
)

MAX_SCHEDULE_SERIES = 100
"""How many schedules get a time series of their own in the metrics."""


class DueSchedules(NamedTuple):
    """Due schedules with the same settings and instants, to which the same decision applies."""

    schedule_ids: list[int]
    versions: list[int]
    paused: bool
    next_fire_at: datetime | None
    base: datetime | None
    paused_from: datetime | None
    rule: Rule
    payload_bytes: int
    """Size of the largest payload as stored."""

    @property
    def schedules(self) -> list[tuple[int, int]]:
        """The schedule_id and version of each."""
        return list(zip(self.schedule_ids, self.versions, strict=True))


class Floor(NamedTuple):
    """The place to continue reading: instant and id of the last due schedule, and the id of the last schedule without a plan."""

    instant: datetime = DISTANT_PAST
    due_id: int = 2**63 - 1
    new_id: int = -1


NO_FLOOR = Floor()


class DueSchedulesResult(NamedTuple):
    """The due schedules, the database's time, time until the next is due, and whether fires are waiting."""

    due: list[DueSchedules]
    now: datetime
    next_in: timedelta | None
    waiting: bool


class DueSchedulesQuery(TypedDict):
    """The parameters of `take_due_schedules` in their order; see the SQL file."""

    shards: Sequence[int]
    overdue: timedelta
    turn: int
    floor: Floor
    limit: int
    horizon: timedelta


def arguments_of(query: DueSchedulesQuery) -> tuple[object, ...]:
    """Return the statement's arguments."""
    return query["shards"], query["overdue"], query["turn"], *query["floor"], query["limit"], query["horizon"]


async def take_due_schedules(db: Connection, **query: Unpack[DueSchedulesQuery]) -> DueSchedulesResult:
    """Return the due schedules of these shards after `floor`; with NO_FLOOR also overdue ones of all other shards."""
    rows = await db.fetch(SQL["take_due_schedules"], *arguments_of(query))
    return DueSchedulesResult(_due_schedules(rows), rows[0][19], rows[0][20], rows[0][21])


def _due_schedules(rows: Sequence[asyncpg.Record]) -> list[DueSchedules]:
    return [
        DueSchedules(row[0], row[1], row[2], row[3], row[4], row[5], _rule(row), row.get("payload_bytes", 0))
        for row in rows
        if row[0] is not None
    ]


def _rule(row: asyncpg.Record) -> Rule:
    return Rule(**dict(zip(RULE_COLUMNS, row[6:19], strict=True)))


FireRow = tuple[datetime, str, datetime | None, int | None, str | None]
"""scheduled_for, plan, missed_from, missed_count, note"""


class Decision(NamedTuple):
    """A decision about schedules with the same settings and instants."""

    schedules: Sequence[tuple[int, int]]
    """The schedule_id and version of each."""
    expected: datetime | None
    """next_fire_at when the schedules were read. The decision is not stored if this or the version has changed."""
    next_fire_at: datetime | None
    decided_up_to: datetime | None
    fires: Sequence[FireRow]


RecordedFires = tuple[str, datetime, int, timedelta]
"""disposition, scheduled_for, how many schedules, how late"""


async def record_fires(db: Connection, decisions: Sequence[Decision]) -> tuple[int, list[RecordedFires]]:
    """Return the number of schedules whose decision was stored, and their fires."""
    schedules = sorted(
        (*schedule, number) for number, decision in enumerate(decisions, 1) for schedule in decision.schedules
    )
    fires = [fire for decision in decisions for fire in decision.fires]
    ends = list(accumulate(len(decision.fires) for decision in decisions))
    rows = await db.fetch(
        SQL["record_fires"],
        *zip(*schedules, strict=True),
        [decision.expected or DISTANT_PAST for decision in decisions],
        [decision.next_fire_at or DISTANT_FUTURE for decision in decisions],
        [decision.decided_up_to or DISTANT_PAST for decision in decisions],
        [1, *(end + 1 for end in ends[:-1])],
        ends,
        [fire[0] for fire in fires],
        [fire[1] for fire in fires],
        [fire[2] or DISTANT_PAST for fire in fires],
        [fire[3] or 0 for fire in fires],
        [fire[4] for fire in fires],
    )
    return rows[0][0], [(row[1], row[2], row[3], row[4]) for row in rows if row[1] is not None]


async def promote_waiting_fires(db: Connection, *, limit: int, only: Sequence[int] | None = None) -> tuple[int, int]:
    """Return how many waiting fires were enqueued, and how many schedules still have waiting fires."""
    row = await fetch_one(db, SQL["promote_waiting_fires"], limit, only)
    return row[0], row[1]


async def replace_live_jobs(db: Connection, *, limit: int, only: Sequence[int] | None = None) -> int:
    """Request cancellation of live jobs that a waiting fire replaces; return their number."""
    requested: int = await db.fetchval(SQL["replace_live_jobs"], limit, only)
    return requested


async def resume_schedules(db: Connection, *, schedules: Sequence[int]) -> int:
    """Resume the schedules whose resume_at has passed; return their number."""
    resumed: int = await db.fetchval(SQL["resume_schedules"], schedules)
    return resumed


async def stop_invalid_schedules(
    db: Connection, stops: Sequence[tuple[int, int, str]]
) -> list[tuple[int, str | None, str]]:
    """Stop schedules, given as (schedule_id, version, reason); return (schedule_id, name, reason) of those that were stopped."""
    rows = await db.fetch(SQL["stop_invalid_schedules"], *zip(*stops, strict=True))
    return [(row[0], row[1], row[2]) for row in rows]


async def stop_unusable_schedules(db: Connection) -> list[tuple[int, str | None, str]]:
    """Stop the schedules with a value outside of rota's limits; return (schedule_id, name, reason) of each."""
    return [(row[0], row[1], row[2]) for row in await db.fetch(SQL["stop_unusable_schedules"])]


async def revive_invalid_schedules(db: Connection) -> int:
    """Mark all invalid schedules as not planned; return their number."""
    revived: int = await db.fetchval(SQL["revive_invalid_schedules"])
    return revived


async def examine_plans(db: Connection, *, rota_version: str, tzdata: str) -> bool:
    """Return whether all next fires were computed with these versions."""
    return await db.fetchval(SQL["examine_plans"], rota_version, tzdata) is True


async def list_planned_schedules(db: Connection, *, after: int, limit: int) -> tuple[list[DueSchedules], int | None]:
    """Return a page of planned cron schedules, and its last schedule_id (None: this was the last page)."""
    rows = await db.fetch(SQL["list_planned_schedules"], after, limit)
    return _due_schedules(rows), rows[0][19]


async def stamp_plans(db: Connection, *, rota_version: str, tzdata: str) -> bool:
    """Record these versions for all next fires; return False if a living node has other versions."""
    stamped: int = await db.fetchval(SQL["stamp_plans"], rota_version, tzdata)
    return stamped > 0


async def note_fire_outcomes(db: Connection, outcomes: Sequence[tuple[int, bool, int]]) -> set[int]:
    """Store (schedule_id, succeeded, failures since), sorted by id; return the schedule_ids whose rows are locked."""
    return set(await db.fetchval(SQL["note_fire_outcomes"], *zip(*outcomes, strict=True)) or ())


async def read_declared(db: Connection, *, app: str, names: Sequence[str]) -> list[StoredSchedule]:
    """Return the schedules that the app has declared, and all schedules with these names."""
    return [StoredSchedule(**row) for row in await db.fetch(SQL["read_declared"], app, names)]


async def apply_declarations(db: Connection, *, app: str, steps: Sequence[Step]) -> set[str]:
    """Carry out the inserts and edits; return the names of the schedules written. The others have changed since they were read."""
    inserts, edits = [], []
    for step in steps:
        values = {"columns": step.columns, "payload": step.payload, "declared": step.declared}
        if step.what == "inserted":
            inserts.append(values)
        elif step.writes:
            edits.append({**values, "name": step.name, "expected": step.expected})
    rows = await db.fetch(SQL["apply_declarations"], app, json.dumps(inserts), json.dumps(edits))
    return {row[0] for row in rows}


async def sample_schedules(db: Connection) -> tuple[dict[str, int], dict[str | None, float]]:
    """Return state -> number of schedules, and name -> last success of watched schedules (None: the oldest of all others)."""
    states = {row[0]: row[1] for row in await db.fetch(SQL["summarise_schedules"]) if row[0] != "silent"}
    return states, {row[0]: row[1] for row in await db.fetch(SQL["sample_schedules"], MAX_SCHEDULE_SERIES)}
