"""Step 7, and the first of a scheduled job's life: due schedules -> fires + jobs, once for each schedule and instant.

A turn reads what is due (`take_due_schedules`), decides purely (`domain.schedule`), and writes what was decided where it
still holds (`record_fires`, one statement a batch). Any number of nodes may do so at once with the same schedules: the first to
write has decided, the others' decisions touch nothing. So shards are about cost alone.
"""

from __future__ import annotations

from contextlib import suppress
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
from rota.db.schedule_queries import NO_FLOOR, Decision, DueLook, DueSchedules, FireRow, Floor, RecordedFires
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
"""Most schedules, and about as many fires, in one statement."""

OVERDUE = timedelta(seconds=2)
"""A schedule that has been due for longer is anybody's: whoever should have looked at it doesn't."""

UNSETTLED = 7.0
"""Seconds for which a node looks at all schedules after others came or went: until every node's row has been seen."""

SWEEP = 0.9
"""Seconds between two looks at everything that is due, however long it has been so, and at what others left undone."""

SWEEP_AT_LAST = 30.0
"""Most seconds between two of them, however long the first one took."""

RECENT = timedelta(seconds=10)
"""How far back the looks between two sweeps go."""

REPLACING = 2.0
"""Seconds after which asking to cancel is put off: somebody else is asking for the same in an open transaction."""


class Scheduler:
    """Service: decide about the due instants of schedules, and sleep until the very next one."""

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
        self._turn = node.int % SHARDS
        self._shards = shards
        self._poll = poll_interval
        self._sweep_at = 0.0
        self._unsettled_until = 0.0
        self._floor = NO_FLOOR
        self._decided = 0
        self._others_left = False
        self._revived = False
        self._checked_up_to: int | None = None
        """Up to which schedule_id the next fires have been found anew; None: there is no need to, or no more."""
        self._waiting = False
        self._served: tuple[int, ...] = ()

    def look(self) -> None:
        """Look now: somebody has edited a schedule."""
        self._wake.set()

    def job_ended(self) -> None:
        """Look now if fires wait for their turn: a job of a schedule has ended here."""
        if self._waiting:
            self._wake.set()

    def nodes_changed(self) -> None:
        """Look at every schedule for a while: a node is going, and who takes over is not settled yet."""
        self._unsettled_until = boottime() + UNSETTLED
        self._wake.set()

    async def run_once(self) -> None:
        """Decide about everything that is due, and return when there is a reason to look again."""
        self._wake.clear()  # before looking, never after
        pause = await self.turn()
        await self._wake.wait(pause)

    async def turn(self) -> float:
        """Decide about what is due, and return for how many seconds there is no reason to look again, notifications aside.

        While one full batch is being written, the next one is looked up, until a batch isn't full or a sweep is due.
        """
        given = self._shards()
        if given is None:  # on its way out
            return self._poll.total_seconds()
        shards = tuple(given)
        if shards != self._served:
            self._served = shards
            self._telemetry.shards_taken(len(shards))
            self._sweep_at = 0.0
        asked = boottime()
        looked = EVERY_SHARD if asked < self._unsettled_until else shards
        self._decided = 0
        soonest: list[datetime] = []
        look = await self._look(looked, sweeps=asked >= self._sweep_at)
        self._waiting = look.waiting
        if look.waiting:
            await self._promote()
        while (more := self._more(look, frozenset(looked))) and boottime() < self._sweep_at:
            asked = boottime()
            found, look = await run_both(self._decide(look), self._look(looked, sweeps=False))
            soonest += found
        soonest += await self._decide(look)
        if self._others_left and self._decided:
            self._sweep_at = 0.0
            return 0.0
        if self._checked_up_to is not None:
            await self._check_plans(self._checked_up_to)
            more = True
        if more:
            return 0.0
        pauses = [self._poll.total_seconds()]
        if look.next_in is not None:
            pauses.append(look.next_in.total_seconds())
        pauses += ((each - look.now).total_seconds() - (boottime() - asked) for each in soonest)
        return max(0.0, min(pauses))

    async def _look(self, shards: Sequence[int], *, sweeps: bool) -> DueLook:
        """Read what is due: all of it in a sweep, else what lies beyond the floor."""
        asked = boottime()
        async with connection(self._pool) as db:
            if not self._revived:
                await self._revive(db)
                self._checked_up_to = None if await schedule_queries.examine_plans(db, **found_with()) else -1
                self._revived = True

            async def take() -> DueLook:
                return await schedule_queries.take_due_schedules(
                    db,
                    shards=shards,
                    overdue=OVERDUE,
                    turn=self._turn,
                    floor=NO_FLOOR if sweeps else self._floor,
                    limit=BATCH,
                    horizon=self._poll,
                )

            look = await self._without_unusable(db, take)
        self._others_left = False
        if sweeps:
            # A sweep may have to step over much that is dead: never more than a tenth of the time. Were there no end to it, a
            # machine that slept a night in the middle of one would leave what came due by then for days.
            self._sweep_at = asked + max(SWEEP, min((boottime() - asked) * THROTTLE_FACTOR, SWEEP_AT_LAST))
        return look

    async def _revive(self, db: Connection) -> None:
        """Plan invalid schedules again, once per start. They stay invalid where that is refused."""
        try:
            await schedule_queries.revive_invalid_schedules(db)
        except asyncpg.PostgresError as error:
            if fault_of(error) is not Fault.ROW:
                raise
            self._telemetry.row_refused("revive", error)

    async def _without_unusable(self, db: Connection, read: Callable[[], Awaitable[T]]) -> T:
        """Read schedules. If one holds a value that can't be computed with or decoded, stop it and read again."""
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

    def _more(self, look: DueLook, looked: frozenset[int]) -> bool:
        """Tell whether there may be more of ours at this moment, and set the floor of the next look."""
        due, new, others = [], [], 0
        for alike in look.due:
            ours = [each for each in alike.schedule_ids if each % SHARDS in looked]
            others += len(alike.schedule_ids) - len(ours)
            if alike.next_fire_at is None:
                new += ours
            else:
                due += [(alike.next_fire_at, each) for each in ours]
        more_due, more_new = len(due) >= BATCH, len(new) >= BATCH // 2
        # Where a batch was full, what lies before its end is decided, or locked by somebody: the next sweep's.
        last = max(due) if more_due else (look.now - RECENT, -1)
        self._floor = Floor(*last, max(new) if more_new else -1)
        self._others_left = self._others_left or others >= BATCH
        return more_due or more_new

    async def _promote(self) -> None:
        """Enqueue the fires whose turn has come, and request cancellation of the jobs that a waiting fire replaces."""
        async with connection(self._pool) as db:

            async def promote(only: Sequence[int] | None) -> int:
                promoted, left = await schedule_queries.promote_waiting_fires(db, limit=BATCH, only=only)
                self._telemetry.fires_promoted(promoted)
                return left

            # A schedule whose job the server refuses keeps its fire waiting; all others go on.
            if any(await self._salvage_waiting(db, "promote", promote)):
                await self._replace(db)

    async def _replace(self, db: Connection) -> None:
        async def replace(only: Sequence[int] | None) -> int:
            asked = await schedule_queries.replace_live_jobs(db, limit=BATCH, patience=REPLACING, only=only)
            self._telemetry.jobs_replaced(asked)
            return asked

        # Another transaction that requests cancellation of the same job blocks this statement, and must block nothing else.
        with suppress(TimeoutError):
            if any(await self._salvage_waiting(db, "replace", replace)):
                await cancel_waiting_jobs(db, self._telemetry)

    async def _salvage_waiting(
        self,
        db: Connection,
        doing: Literal["promote", "replace"],
        run: Callable[[Sequence[int] | None], Awaitable[int]],
    ) -> list[int]:
        """Run a statement over the schedules with waiting fires, around those for which it fails."""
        names: dict[int, str | None] = {}

        async def find() -> Sequence[int]:
            names.update(await queries.find_salvage_rows(db, doing=doing, limit=BATCH))
            return list(names)

        async def refuse(schedule_id: int, error: Exception) -> int:
            self._telemetry.row_refused(doing, error, schedule_id=schedule_id, schedule=names.get(schedule_id))
            return 0

        return await salvage_selected(run, find, refuse)

    async def _decide(self, look: DueLook) -> list[datetime]:
        """Decide about what a look has found due, write it, and return the instants that come next."""
        if not look.due:
            return []
        async with connection(self._pool) as db:
            return await self._decide_on(db, look.due, look.now)

    async def _decide_on(self, db: Connection, due: Iterable[DueSchedules], now: datetime) -> list[datetime]:
        soonest: list[datetime] = []
        batch: list[Decision] = []
        gathered = 0
        invalid: list[tuple[int, int, str]] = []
        for alike in due:
            if alike.paused:
                await self._resume(db, alike)
                continue
            try:
                planned = plan(
                    alike.rule,
                    now=now,
                    next_fire_at=alike.next_fire_at,
                    base=alike.base,
                    paused_from=alike.paused_from,
                )
            except Exception as error:  # noqa: BLE001  planning is pure: an exception is about this schedule
                invalid += _refused(alike, error)
                continue
            following = planned.next_fire_at
            soonest.append(following or now + self._poll)
            fires = _rows(planned)
            schedules = alike.schedules
            at_once = max(1, BATCH // max(1, len(fires)))
            for start in range(0, len(schedules), at_once):
                part = schedules[start : start + at_once]
                batch.append(Decision(part, alike.next_fire_at, following, planned.decided_up_to, fires))
                gathered += len(part) * max(1, len(fires))
                if gathered >= BATCH:
                    await self._record(db, batch)
                    batch, gathered = [], 0
        if batch:
            await self._record(db, batch)
        if invalid:
            await self._stop(db, invalid)
        return soonest

    async def _check_plans(self, after: int) -> None:
        """Find the next fires of a page of schedules anew, because another rota or other zone data found them.

        As after an edit, they lie after this moment. What is due already is left to be decided about.
        """
        async with connection(self._pool) as db:

            async def list_page() -> tuple[list[DueSchedules], int | None]:
                return await schedule_queries.list_planned_schedules(db, after=after, limit=BATCH)

            page, last = await self._without_unusable(db, list_page)
            others: list[Decision] = []
            invalid: list[tuple[int, int, str]] = []
            for alike in page:
                assert alike.base is not None  # noqa: S101  the query's greatest()
                try:
                    following = alike.rule.first_after(alike.base)
                except Exception as error:  # noqa: BLE001  as in _decide_on
                    invalid += _refused(alike, error)
                    continue
                if following != alike.next_fire_at:
                    others.append(Decision(alike.schedules, alike.next_fire_at, following, None, []))
            if others:
                moved, _ = await self._record_fires(db, others)
                self._telemetry.schedules_moved(moved)
            if invalid:
                await self._stop(db, invalid)
            if last is None:
                await schedule_queries.stamp_plans(db, **found_with())
            self._checked_up_to = last

    async def _resume(self, db: Connection, alike: DueSchedules) -> None:
        """Resume paused schedules whose time has come. One whose update the server refuses is stopped."""

        async def resume(some: Sequence[tuple[int, int]]) -> int:
            return await schedule_queries.resume_schedules(db, schedules=[schedule_id for schedule_id, _ in some])

        async def refuse(which: tuple[int, int], error: Exception) -> int:
            await self._stop(db, [(*which, _refusal("the database refuses to resume it", error))])
            return 0

        resumed = sum(await salvage(alike.schedules, resume, refuse))
        self._telemetry.schedules_resumed(resumed)
        if resumed:
            self._wake.set()

    async def _record(self, db: Connection, decisions: Sequence[Decision]) -> None:
        decided, fires = await self._record_fires(db, decisions)
        self._decided += decided
        planned = sum(len(decision.schedules) for decision in decisions)
        self._telemetry.fires_recorded(planned=planned, decided=decided, fires=fires)
        if any(disposition == "waiting" for disposition, _, _, _ in fires):
            self._waiting = True
            await self._replace(db)

    async def _record_fires(self, db: Connection, decisions: Sequence[Decision]) -> tuple[int, list[RecordedFires]]:
        """Write the decisions. A schedule whose job the server refuses is stopped, and its neighbours fire."""

        async def record(some: Sequence[tuple[Decision, tuple[int, int]]]) -> tuple[int, list[RecordedFires]]:
            batch = [
                decision._replace(schedules=[which for _, which in alike])
                for decision, alike in groupby(some, key=itemgetter(0))
            ]
            return await schedule_queries.record_fires(db, batch)

        async def refuse(row: tuple[Decision, tuple[int, int]], error: Exception) -> tuple[int, list[RecordedFires]]:
            await self._stop(db, [(*row[1], _refusal("the database refuses its job", error))])
            return 0, []

        schedules = [(decision, which) for decision in decisions for which in decision.schedules]
        recorded = await salvage(schedules, record, refuse)
        return sum(decided for decided, _ in recorded), [fire for _, fires in recorded for fire in fires]

    async def _stop(self, db: Connection, invalid: Sequence[tuple[int, int, str]]) -> None:
        """Stop schedules with a reason, until they are edited."""

        async def stop(some: Sequence[tuple[int, int, str]]) -> None:
            for schedule_id, name, reason in await schedule_queries.stop_invalid_schedules(db, some):
                self._telemetry.schedule_invalid(schedule_id=schedule_id, name=name, reason=reason)

        async def refuse(row: tuple[int, int, str], error: Exception) -> None:
            self._telemetry.row_refused("stop", error, schedule_id=row[0])

        await salvage(invalid, stop, refuse)


def _refusal(what: str, error: Exception) -> str:
    return f"{what}: {getattr(error, 'constraint_name', None) or error}"[:500]


@cache
def found_with() -> dict[str, str]:
    """Return what the next fires that this node finds rest on."""
    return {"rota_version": version("rota"), "tzdata": tzdata_version()}


def _refused(alike: DueSchedules, error: Exception) -> list[tuple[int, int, str]]:
    reason = str(error)[:500] or type(error).__name__
    return [(*which, reason) for which in alike.schedules]


def _rows(planned: Plan) -> list[FireRow]:
    return [(fire.scheduled_for, fire.plan, fire.missed_from, fire.missed_count, fire.note) for fire in planned.fires]
