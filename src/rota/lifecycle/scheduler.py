"""Turn due schedules into fires and jobs, once for each schedule and instant.

A turn reads the due schedules (`take_due_schedules`), decides about them without the database (`domain.schedule`), and writes the
decisions (`record_fires`, one statement a batch). Several nodes may decide about the same schedule: the first write wins, and the
others change nothing. Dividing the schedules into shards only saves work.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, TypeVar

import asyncpg

from rota.cron import tzdata_version
from rota.db import queries, schedule_queries
from rota.db.pool import Connection, Pool, connection
from rota.db.salvage import ROW_CLIENT_ERRORS, Fault, fault_of, salvage, salvage_selected
from rota.db.schedule_queries import NO_FLOOR, Decision, DueSchedules, DueSchedulesResult, FireRow, Floor, RecordedFires
from rota.domain.schedule import plan
from rota.domain.shards import EVERY_SHARD, SHARDS
from rota.lifecycle.ending import cancel_waiting_jobs
from rota.runtime.clock import boottime
from rota.supervision.loop import THROTTLE_FACTOR, run_both

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from datetime import datetime

    from rota.domain.job import NodeId
    from rota.domain.schedule import Plan
    from rota.lifecycle.wake import Wake
    from rota.observability.telemetry import Telemetry

T = TypeVar("T")

BATCH = 1000
"""A statement has at most this many schedules, and about as many fires."""

WEIGHED_BYTES = 50_000
"""For each such part of its payload, a fire counts as one more in its batch: a statement must end within seconds."""

MAX_PROMOTED = 250
"""A statement enqueues at most this many waiting fires, each of which may have a payload of 1 MiB."""

OVERDUE_AFTER = timedelta(seconds=2)
"""Any node takes a schedule that has been due for longer, because the node of its shard does not."""

ALL_SHARDS_SECONDS = 7.0
"""How long a node searches all shards after other nodes came or went: until every node has seen every row of rota.nodes."""

SWEEP_SECONDS = 0.9
"""Pause between two sweeps. A sweep searches all due schedules, and overdue ones of other nodes' shards."""

MAX_SWEEP_SECONDS = 30.0
"""Longest pause between two sweeps, however long the first one took."""

SEARCH_BACK = timedelta(seconds=10)
"""Between two sweeps, search only for schedules that became due within this time."""


class Scheduler:
    """Service: decides about the due instants of schedules, and sleeps until the next one."""

    name = "scheduler"
    interval: timedelta | None = None

    def __init__(
        self,
        pool: Pool,
        wake: Wake,
        telemetry: Telemetry,
        *,
        node: NodeId,
        shards: Callable[[], Sequence[int] | None],
        poll_interval: timedelta,
    ) -> None:
        self._pool = pool
        self._wake = wake
        self._telemetry = telemetry
        self._node_number = node.int % SHARDS
        self._read_shards = shards
        self._poll = poll_interval
        self._sweep_at = 0.0
        self._all_shards_until = 0.0
        self._floor = NO_FLOOR
        self._decided = 0
        """Schedules whose decision this turn has stored."""
        self._more_overdue = False
        """Whether the last read may have missed overdue schedules of other shards."""
        self._cut_short = False
        """Whether this turn has stored only a part of a decision: the schedule is still due."""
        self._prepared = False
        self._checked_up_to: int | None = None
        """The last schedule_id whose next fire has been computed anew; None if no check is under way."""
        self._has_waiting_fires = False
        self._shards_served: tuple[int, ...] = ()

    def wake(self) -> None:
        """Read the due schedules now: a schedule has been edited."""
        self._wake.set()

    def job_ended(self) -> None:
        """Read the due schedules now if fires are waiting: a job of a schedule has ended on this node."""
        if self._has_waiting_fires:
            self._wake.set()

    def nodes_changed(self) -> None:
        """Search all shards for a while: a node is leaving, and the other nodes have not divided its shards yet."""
        self._all_shards_until = boottime() + ALL_SHARDS_SECONDS
        self._wake.set()

    async def run_once(self) -> None:
        """Decide about all due schedules, then wait until there may be others."""
        self._wake.clear()  # before reading, never after
        pause = await self.turn()
        await self._wake.wait(pause)

    async def turn(self) -> float:
        """Decide about all due schedules. Return the seconds to wait if no notification comes earlier.

        Two tasks alternately read a page and write its decisions, until a page is not full or a sweep is due. Only one of them
        reads at a time, because a page begins where the previous one ended.
        """
        assigned = self._read_shards()
        if assigned is None:  # this node is leaving
            return self._poll.total_seconds()
        shards = tuple(assigned)
        if shards != self._shards_served:
            self._shards_served = shards
            self._telemetry.shards_taken(len(shards))
            self._sweep_at = 0.0
        read_at = boottime()
        searched = EVERY_SHARD if read_at < self._all_shards_until else shards
        self._decided, self._cut_short = 0, False
        next_instants: list[datetime] = []
        page = await self._read_page(searched, is_sweep=read_at >= self._sweep_at)
        self._has_waiting_fires = page.waiting
        if page.waiting:
            await self._promote()
        more = self._has_more(page, frozenset(searched))
        reading = asyncio.Lock()

        async def read_next() -> DueSchedulesResult | None:
            nonlocal page, more, read_at
            async with reading:
                if not more or boottime() >= self._sweep_at:
                    return None
                read_at = boottime()
                page = await self._read_page(searched, is_sweep=False)
                more = self._has_more(page, frozenset(searched))
                return page

        async def decide_from(first: DueSchedulesResult | None) -> None:
            current = first
            while current is not None:
                next_instants.extend(await self._decide(current))
                current = await read_next()

        async def read_and_decide() -> None:
            await decide_from(await read_next())

        await run_both(decide_from(page), read_and_decide())
        if (self._more_overdue or self._cut_short) and self._decided:
            self._sweep_at = 0.0
            return 0.0
        if self._checked_up_to is not None:
            await self._check_plans(self._checked_up_to)
            more = True
        if more:
            return 0.0
        pauses = [self._poll.total_seconds()]
        if page.next_in is not None:
            pauses.append(page.next_in.total_seconds())
        pauses += ((instant - page.now).total_seconds() - (boottime() - read_at) for instant in next_instants)
        return max(0.0, min(pauses))

    async def _read_page(self, shards: Sequence[int], *, is_sweep: bool) -> DueSchedulesResult:
        """Read a batch of due schedules: any in a sweep, else only those beyond the floor."""
        began = boottime()
        async with connection(self._pool) as db:
            if not self._prepared:
                await self._revive(db)
                self._checked_up_to = None if await schedule_queries.examine_plans(db, **planner_versions()) else -1
                self._prepared = True

            async def take() -> DueSchedulesResult:
                return await schedule_queries.take_due_schedules(
                    db,
                    shards=shards,
                    overdue=OVERDUE_AFTER,
                    turn=self._node_number,
                    floor=NO_FLOOR if is_sweep else self._floor,
                    limit=BATCH,
                    horizon=self._poll,
                )

            page = await self._stop_unusable_and_retry(db, take)
        self._more_overdue = False
        if is_sweep:
            # Throttled, because a sweep may step over many dead rows. Capped: after the machine was suspended for a night during
            # a sweep, an uncapped pause would last for days.
            self._sweep_at = began + max(SWEEP_SECONDS, min((boottime() - began) * THROTTLE_FACTOR, MAX_SWEEP_SECONDS))
        return page

    async def _revive(self, db: Connection) -> None:
        """Plan invalid schedules again, once per start: this version of rota may accept them. They stay invalid if that fails."""
        try:
            await schedule_queries.revive_invalid_schedules(db)
        except asyncpg.PostgresError as error:
            if fault_of(error) is not Fault.ROW:
                raise
            self._telemetry.row_refused("revive", error)

    async def _stop_unusable_and_retry(self, db: Connection, read: Callable[[], Awaitable[T]]) -> T:
        """Read schedules. If one has a value that can't be decoded or computed with, stop that schedule and read again."""
        try:
            return await read()
        except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
            if fault_of(error) is not Fault.ROW:
                raise
            stopped = await schedule_queries.stop_unusable_schedules(db)
            if not stopped:
                raise
        for schedule_id, name, reason in stopped:
            self._telemetry.schedule_invalid(schedule_id=schedule_id, name=name, reason=reason)
        return await read()

    def _has_more(self, page: DueSchedulesResult, searched: frozenset[int]) -> bool:
        """Return whether more schedules of the searched shards may be due, and set the floor of the next read."""
        due, new, others = [], [], 0
        for group in page.due:
            own = [schedule_id for schedule_id in group.schedule_ids if schedule_id % SHARDS in searched]
            others += len(group.schedule_ids) - len(own)
            if group.next_fire_at is None:
                new += own
            else:
                due += [(group.next_fire_at, schedule_id) for schedule_id in own]
        more_due, more_new = len(due) >= BATCH, len(new) >= BATCH // 2
        # Schedules before the end of a full batch are decided, or locked by another session. The next sweep finds the latter.
        last = max(due) if more_due else (page.now - SEARCH_BACK, -1)
        self._floor = Floor(*last, max(new) if more_new else -1)
        self._more_overdue = self._more_overdue or others >= BATCH
        return more_due or more_new

    async def _promote(self) -> None:
        """Enqueue waiting fires whose schedule has no live job, and request cancellation of jobs that a waiting fire replaces."""
        async with connection(self._pool) as db:

            async def promote(only: Sequence[int] | None) -> int:
                promoted, still_waiting = await schedule_queries.promote_waiting_fires(
                    db, limit=MAX_PROMOTED, only=only
                )
                self._telemetry.fires_promoted(promoted)
                return still_waiting

            # The fire of a schedule whose job the server refuses stays waiting.
            if any(await self._salvage_waiting(db, "promote", promote)):
                await self._replace(db)

    async def _replace(self, db: Connection) -> None:
        async def replace(only: Sequence[int] | None) -> int:
            requested = await schedule_queries.replace_live_jobs(db, limit=BATCH, only=only)
            self._telemetry.jobs_replaced(requested)
            return requested

        if any(await self._salvage_waiting(db, "replace", replace)):
            await cancel_waiting_jobs(db, self._telemetry)

    async def _salvage_waiting(
        self,
        db: Connection,
        doing: Literal["promote", "replace"],
        run: Callable[[Sequence[int] | None], Awaitable[int]],
    ) -> list[int]:
        """Run a statement over the schedules with waiting fires, and report the schedules for which it fails."""
        names: dict[int, str | None] = {}

        async def find() -> Sequence[int]:
            names.update(await queries.find_salvage_rows(db, doing=doing, limit=BATCH))
            return list(names)

        async def refuse(schedule_id: int, error: Exception) -> int:
            self._telemetry.row_refused(doing, error, schedule_id=schedule_id, schedule=names.get(schedule_id))
            return 0

        return await salvage_selected(run, find, refuse)

    async def _decide(self, page: DueSchedulesResult) -> list[datetime]:
        """Decide about the due schedules of a page, and write the decisions. Return the next instant of each schedule."""
        if not page.due:
            return []
        async with connection(self._pool) as db:
            return await self._decide_on(db, page.due, page.now)

    async def _decide_on(self, db: Connection, due: Iterable[DueSchedules], now: datetime) -> list[datetime]:
        next_instants: list[datetime] = []
        batch: list[Decision] = []
        fire_count = 0
        invalid: list[tuple[int, int, str]] = []
        for group in due:
            if group.paused:
                await self._resume(db, group)
                continue
            try:
                planned = plan(
                    group.rule,
                    now=now,
                    next_fire_at=group.next_fire_at,
                    base=group.base,
                    paused_from=group.paused_from,
                )
            except Exception as error:  # noqa: BLE001  planning uses nothing but the schedule, so the error is about it
                invalid += _invalid_schedules(group, error)
                continue
            most = BATCH // (1 + group.payload_bytes // WEIGHED_BYTES)
            if group.rule.overlap == "allow" and len(planned.fires) > most:
                planned = planned.first(most)
                self._cut_short = True
            following = planned.next_fire_at
            next_instants.append(following or now + self._poll)
            fires = _fire_rows(planned)
            schedules = group.schedules
            weight = max(1, len(fires)) * BATCH // most
            per_decision = max(1, BATCH // weight)
            for start in range(0, len(schedules), per_decision):
                part = schedules[start : start + per_decision]
                batch.append(Decision(part, group.next_fire_at, following, planned.decided_up_to, fires))
                fire_count += len(part) * weight
                if fire_count >= BATCH:
                    await self._record(db, batch)
                    batch, fire_count = [], 0
        if batch:
            await self._record(db, batch)
        if invalid:
            await self._stop(db, invalid)
        return next_instants

    async def _check_plans(self, after: int) -> None:
        """Compute the next fires of a page of schedules again, because another version of rota or of the zone data computed them.

        As after an edit, the new instants lie in the future. Schedules that are due already are skipped.
        """
        async with connection(self._pool) as db:

            async def list_page() -> tuple[list[DueSchedules], int | None]:
                return await schedule_queries.list_planned_schedules(db, after=after, limit=BATCH)

            page, last = await self._stop_unusable_and_retry(db, list_page)
            changes: list[Decision] = []
            invalid: list[tuple[int, int, str]] = []
            for group in page:
                assert group.base is not None  # noqa: S101  the query's greatest()
                try:
                    following = group.rule.first_after(group.base)
                except Exception as error:  # noqa: BLE001  as in _decide_on
                    invalid += _invalid_schedules(group, error)
                    continue
                if following != group.next_fire_at:
                    changes.append(Decision(group.schedules, group.next_fire_at, following, None, []))
            if changes:
                moved, _ = await self._record_fires(db, changes)
                self._telemetry.schedules_moved(moved)
            if invalid:
                await self._stop(db, invalid)
            if last is None:
                await schedule_queries.stamp_plans(db, **planner_versions())
            self._checked_up_to = last

    async def _resume(self, db: Connection, group: DueSchedules) -> None:
        """Resume schedules whose pause has expired. Stop a schedule whose update the server refuses."""

        async def resume(part: Sequence[tuple[int, int]]) -> int:
            return await schedule_queries.resume_schedules(db, schedules=[schedule_id for schedule_id, _ in part])

        async def refuse(schedule: tuple[int, int], error: Exception) -> int:
            await self._stop(db, [(*schedule, _refusal("the database refuses to resume it", error))])
            return 0

        resumed = sum(await salvage(group.schedules, resume, refuse))
        self._telemetry.schedules_resumed(resumed)
        if resumed:
            self._wake.set()

    async def _record(self, db: Connection, decisions: Sequence[Decision]) -> None:
        decided, fires = await self._record_fires(db, decisions)
        self._decided += decided
        planned = sum(len(decision.schedules) for decision in decisions)
        self._telemetry.fires_recorded(planned=planned, decided=decided, fires=fires)
        if any(disposition == "waiting" for disposition, _, _, _ in fires):
            self._has_waiting_fires = True
            await self._replace(db)

    async def _record_fires(self, db: Connection, decisions: Sequence[Decision]) -> tuple[int, list[RecordedFires]]:
        """Write the decisions. Stop a schedule whose job the server refuses; the others fire."""

        async def record(part: Sequence[tuple[Decision, tuple[int, int]]]) -> tuple[int, list[RecordedFires]]:
            batch = [
                decision._replace(schedules=[schedule for _, schedule in group])
                for decision, group in groupby(part, key=itemgetter(0))
            ]
            return await schedule_queries.record_fires(db, batch)

        async def refuse(row: tuple[Decision, tuple[int, int]], error: Exception) -> tuple[int, list[RecordedFires]]:
            await self._stop(db, [(*row[1], _refusal("the database refuses its job", error))])
            return 0, []

        rows = [(decision, schedule) for decision in decisions for schedule in decision.schedules]
        recorded = await salvage(rows, record, refuse)
        return sum(decided for decided, _ in recorded), [fire for _, fires in recorded for fire in fires]

    async def _stop(self, db: Connection, invalid: Sequence[tuple[int, int, str]]) -> None:
        """Mark schedules as invalid, with a reason. They do not fire until they are edited."""

        async def stop(part: Sequence[tuple[int, int, str]]) -> None:
            for schedule_id, name, reason in await schedule_queries.stop_invalid_schedules(db, part):
                self._telemetry.schedule_invalid(schedule_id=schedule_id, name=name, reason=reason)

        async def refuse(row: tuple[int, int, str], error: Exception) -> None:
            self._telemetry.row_refused("stop", error, schedule_id=row[0])

        await salvage(invalid, stop, refuse)


def _refusal(message: str, error: Exception) -> str:
    return f"{message}: {getattr(error, 'constraint_name', None) or error}"[:500]


@cache
def planner_versions() -> dict[str, str]:
    """Return the versions on which the next fires depend that this node computes."""
    return {"rota_version": version("rota"), "tzdata": tzdata_version()}


def _invalid_schedules(group: DueSchedules, error: Exception) -> list[tuple[int, int, str]]:
    reason = str(error)[:500] or type(error).__name__
    return [(*schedule, reason) for schedule in group.schedules]


def _fire_rows(planned: Plan) -> list[FireRow]:
    return [(fire.scheduled_for, fire.plan, fire.missed_from, fire.missed_count, fire.note) for fire in planned.fires]
