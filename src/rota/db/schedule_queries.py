"""What daemons do with schedules: one typed function for each of their files in sql/queries, in the order of a fire's life.

Nothing here but the call. `schedule_reports` has what people ask about them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from rota.db.sql import SQL
from rota.domain.declaration import Stored
from rota.domain.schedule import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import asyncpg

    from rota.db.pool import Connection
    from rota.domain.declaration import Step

DISTANT_PAST = datetime.min.replace(tzinfo=UTC)
"""What the driver sends as -infinity."""

DISTANT_FUTURE = datetime.max.replace(tzinfo=UTC)
"""What the driver sends as infinity."""

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

WATCHED = 100
"""Most schedules that have a time series of their own."""


class DueSchedules(NamedTuple):
    """Schedules that are due and alike in all that decides about them."""

    schedule_ids: list[int]
    versions: list[int]
    paused: bool
    next_fire_at: datetime | None
    base: datetime | None
    paused_from: datetime | None
    rule: Rule

    @property
    def schedules(self) -> list[tuple[int, int]]:
        """The schedule_id and version of each."""
        return list(zip(self.schedule_ids, self.versions, strict=True))


class Floor(NamedTuple):
    """Beyond what to look: the instant and schedule_id of the last due one, and the schedule_id of the last to be planned."""

    instant: datetime = DISTANT_PAST
    due_id: int = 2**63 - 1
    new_id: int = -1


NO_FLOOR = Floor()


class DueLook(NamedTuple):
    """What a look at the schedules found, and when by the database's clock."""

    due: list[DueSchedules]
    now: datetime
    next_in: timedelta | None
    waiting: bool


class Look(TypedDict):
    """What `take_due_schedules` is asked with, in the order of its parameters."""

    shards: Sequence[int]
    overdue: timedelta
    turn: int
    floor: Floor
    limit: int
    horizon: timedelta


def arguments_of(look: Look) -> tuple[object, ...]:
    """Return the statement's arguments."""
    return look["shards"], look["overdue"], look["turn"], *look["floor"], look["limit"], look["horizon"]


async def take_due_schedules(db: Connection, **look: Unpack[Look]) -> DueLook:
    """Return the due schedules of these shards beyond `floor`, with NO_FLOOR also the overdue ones of all others."""
    rows = await db.fetch(SQL["take_due_schedules"], *arguments_of(look))
    return DueLook(_alike(rows), rows[0][19], rows[0][20], rows[0][21])


def _alike(rows: Sequence[asyncpg.Record]) -> list[DueSchedules]:
    return [
        DueSchedules(row[0], row[1], row[2], row[3], row[4], row[5], _rule(row)) for row in rows if row[0] is not None
    ]


def _rule(row: asyncpg.Record) -> Rule:
    return Rule(**dict(zip(RULE_COLUMNS, row[6:19], strict=True)))


FireRow = tuple[datetime, str, datetime | None, int | None, str | None]
"""scheduled_for, plan, missed_from, missed_count, note"""


class Decision(NamedTuple):
    """What was decided about schedules that are alike."""

    schedules: Sequence[tuple[int, int]]
    """The schedule_id and version of each."""
    expected: datetime | None
    """The next_fire_at on which it rests, beside the version."""
    next_fire_at: datetime | None
    decided_up_to: datetime | None
    fires: Sequence[FireRow]


RecordedFires = tuple[str, datetime, int, timedelta]
"""disposition, scheduled_for, how many schedules, how late"""


async def record_fires(db: Connection, decisions: Sequence[Decision]) -> tuple[int, list[RecordedFires]]:
    """Return the number of schedules whose decision was stored, and their fires."""
    given = sorted((*which, number) for number, each in enumerate(decisions, 1) for which in each.schedules)
    fires = [fire for each in decisions for fire in each.fires]
    ends = list(accumulate(len(each.fires) for each in decisions))
    rows = await db.fetch(
        SQL["record_fires"],
        *zip(*given, strict=True),
        [each.expected or DISTANT_PAST for each in decisions],
        [each.next_fire_at or DISTANT_FUTURE for each in decisions],
        [each.decided_up_to or DISTANT_PAST for each in decisions],
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
    row = await db.fetchrow(SQL["promote_waiting_fires"], limit, only)
    assert row is not None  # noqa: S101  an aggregate
    return row[0], row[1]


async def replace_live_jobs(db: Connection, *, limit: int, patience: float, only: Sequence[int] | None = None) -> int:
    """Return how many live jobs were asked to cancel because a fire waits that replaces them."""
    asked: int = await db.fetchval(SQL["replace_live_jobs"], limit, only, timeout=patience)
    return asked


async def resume_schedules(db: Connection, *, schedules: Sequence[int]) -> int:
    """Return how many paused schedules were resumed because it is time."""
    resumed: int = await db.fetchval(SQL["resume_schedules"], schedules)
    return resumed


async def stop_invalid_schedules(
    db: Connection, stops: Sequence[tuple[int, int, str]]
) -> list[tuple[int, str | None, str]]:
    """Take (schedule_id, version, reason) each; return (schedule_id, name, reason) of what now stands still."""
    rows = await db.fetch(SQL["stop_invalid_schedules"], *zip(*stops, strict=True))
    return [(row[0], row[1], row[2]) for row in rows]


async def stop_unusable_schedules(db: Connection) -> list[tuple[int, str | None, str]]:
    """Stop the schedules whose row holds a value that can't be computed with; return (schedule_id, name, reason) of each."""
    return [(row[0], row[1], row[2]) for row in await db.fetch(SQL["stop_unusable_schedules"])]


async def revive_invalid_schedules(db: Connection) -> int:
    """Return how many invalid schedules are planned again."""
    revived: int = await db.fetchval(SQL["revive_invalid_schedules"])
    return revived


async def examine_plans(db: Connection, *, rota_version: str, tzdata: str) -> bool:
    """Return whether all next fires were found by this rota with this zone data."""
    return await db.fetchval(SQL["examine_plans"], rota_version, tzdata) is True


async def list_planned_schedules(db: Connection, *, after: int, limit: int) -> tuple[list[DueSchedules], int | None]:
    """Return the cron schedules of a page that are not due yet, and the schedule_id that ends it, None after the last page."""
    rows = await db.fetch(SQL["list_planned_schedules"], after, limit)
    return _alike(rows), rows[0][19]


async def stamp_plans(db: Connection, *, rota_version: str, tzdata: str) -> bool:
    """Return whether it is written down that they all were: no living daemon finds next fires otherwise."""
    stamped: int = await db.fetchval(SQL["stamp_plans"], rota_version, tzdata)
    return stamped > 0


async def note_fire_outcomes(db: Connection, outcomes: Sequence[tuple[int, bool, int]]) -> set[int]:
    """Take (schedule_id, succeeded, failures since) each, in order; return whose could not be written at this moment."""
    return set(await db.fetchval(SQL["note_fire_outcomes"], *zip(*outcomes, strict=True)) or ())


async def read_declared(db: Connection, *, app: str, names: Sequence[str]) -> list[Stored]:
    """Return the schedules that the app has declared, and those of these names, whoever made them."""
    return [Stored(**row) for row in await db.fetch(SQL["read_declared"], app, names)]


async def apply_declarations(db: Connection, *, app: str, steps: Sequence[Step]) -> set[str]:
    """Write the steps that write; return the names of the schedules that were still as they had been read."""
    inserts, edits = [], []
    for step in steps:
        given = {"columns": step.columns, "payload": step.payload, "declared": step.declared}
        if step.what == "inserted":
            inserts.append(given)
        elif step.writes:
            edits.append({**given, "name": step.name, "expected": step.expected})
    rows = await db.fetch(SQL["apply_declarations"], app, json.dumps(inserts), json.dumps(edits))
    return {row[0] for row in rows}


async def sample_schedules(db: Connection) -> tuple[dict[str, int], dict[str | None, float]]:
    """Return state -> how many, and name -> last success of watched schedules; as None the oldest of those that aren't named."""
    states = {row[0]: row[1] for row in await db.fetch(SQL["summarise_schedules"]) if row[0] != "silent"}
    return states, {row[0]: row[1] for row in await db.fetch(SQL["sample_schedules"], WATCHED)}
