"""Random dispatcher cycles against an in-memory model of the table. The clock and the queries are fakes."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import pytest

from rota.db.queries import ANY_TIME, Claimed, DueJob
from rota.domain.job import Claim, FenceToken, NodeId, Suspects
from rota.lifecycle import dispatcher as dispatcher_module
from rota.lifecycle import lanes as lanes_module
from rota.lifecycle import refused_jobs as refused_jobs_module
from rota.lifecycle import running as running_module
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.lanes import LANE_IDLE_SECONDS
from rota.lifecycle.running import Running
from rota.lifecycle.slots import AHEAD_SECONDS
from rota.lifecycle.wake import Wake
from rota.supervision.service_monitor import ServiceMonitor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from rota.handlers.attempt import Attempt

POLL = 1.0
SLACK = 0.1
"""Duration of a dispatcher cycle itself, in seconds of the model's clock."""

START = datetime(2026, 1, 1, tzinfo=ANY_TIME.tzinfo)
PAGE = 4


@dataclass(slots=True)
class Row:
    """A scheduled job. `visible_at` is when its insert commits, which may be later than run_at."""

    job_id: int
    queue: str
    handler: str
    priority: int
    run_at: float
    visible_at: float
    suspect: bool = False
    bad: bool = False

    @property
    def lane(self) -> tuple[str, str, int]:
        """Return the lane of the row."""
        return self.queue, self.handler, self.priority


class Model:
    """The table, the clock, and what the dispatcher did."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 1000.0
        self.rows: dict[int, Row] = {}
        self.ends: list[tuple[float, Attempt]] = []
        self.buried: set[int] = set()
        self.claimed: set[int] = set()
        self.failed_at = 0.0
        self.free_since: defaultdict[str, float] = defaultdict(lambda: self.now)
        self.given_back_count = 0
        self.ids = 0
        slots = {"default": self.dice.choice([1, 3, 20]), "mail": self.dice.choice([0, 2]), "*": 3}
        self.slots = {queue: slots[queue] for queue in self.dice.sample(sorted(slots), 3)}
        self.running = Running(self.slots, Wake(), grace=1)
        self.taken: dict[int, Row] = {}
        self.durations = self.dice.choice([[0.001, 0.05, 0.3, 2.0], [0.0005], [0.0005] * 99 + [2.0]])
        listener: Any = SimpleNamespace(armed=True, want=lambda _: None)
        self.dispatcher = Dispatcher(
            None,  # type: ignore[arg-type]
            self.running,
            Wake(),
            listener,
            NoTelemetry(),  # type: ignore[arg-type]
            monitor=ServiceMonitor(),
            node=NodeId(UUID(int=1)),
            handlers=["a", "b"],
            queues=self.slots,
            lease=timedelta(seconds=30),
            poll_interval=timedelta(seconds=POLL),
            start=self.start,
        )

    # The interface that the dispatcher uses.

    def boottime(self) -> float:
        return self.now

    @asynccontextmanager
    async def connection(self, _: object) -> AsyncIterator[None]:
        yield None

    async def list_queues(
        self, _: object, *, after: str, limit: int, handlers: Sequence[str]
    ) -> list[tuple[str, list[str]]]:
        self.now += 0.001
        present: dict[str, set[str]] = {}
        for row in self.visible_rows():
            if row.queue > after:
                present.setdefault(row.queue, set()).add(row.handler)
        return [(queue, sorted(present[queue] & set(handlers))) for queue in sorted(present)[:limit]]

    async def claim_due_jobs(
        self,
        _: object,
        *,
        groups: Mapping[str, int],
        lanes: Sequence[tuple[str, str, str, int, datetime]],
        suspects: int,
        total: int,
        known: Collection[str] | None,
        only: Collection[int] | None,
        skipped: Collection[int],
        **__: object,
    ) -> Claimed:
        self.now += self.dice.uniform(0.0005, 0.003)
        if self.dice.random() < 0.02:
            self.failed_at = self.now
            raise ConnectionError
        floors = {lane[1:4]: lane[4] for lane in lanes}
        assert len(floors) == len(lanes), "a lane was searched twice in one statement"
        due = self.due(skipped, suspects=suspects != Suspects.NONE)
        due_lanes = [
            (*lane[:4], at(min(heads)))
            for lane in lanes
            if (heads := [row.run_at for row in due if row.lane == lane[1:4] and at(row.run_at) >= lane[4]])
        ]
        found: list[Row] = []
        for group, slots in groups.items():
            fits = [
                row
                for row in self.due(skipped, suspects=suspects != Suspects.NONE)
                if self.dispatcher._lanes.group(row.queue) == group
                and row.lane in floors
                and at(row.run_at) >= floors[row.lane]
                and (only is None or row.job_id in only)
            ]
            found += sorted(fits, key=lambda row: (row.priority, row.run_at))[:slots]
        found = found[:total]
        if any(row.bad for row in found):
            raise asyncpg.DatetimeFieldOverflowError
        for row in found:
            self.taken[row.job_id] = self.rows.pop(row.job_id)
            self.claimed.add(row.job_id)
        if suspects == Suspects.NONE and only is None:
            self.check_order(found, skipped)
        has_unknown_queue = known is not None and self.has_unknown_queue(known)
        return Claimed([self.as_claim(row) for row in found], None, has_unknown_queue, due_lanes)

    async def find_due_jobs(
        self, _: object, *, lanes: Sequence[Any], suspects: int, skipped: Collection[int], limit: int
    ) -> list[DueJob]:
        searched = {lane[1:4] for lane in lanes}
        found = [row for row in self.due(skipped, suspects=suspects != Suspects.NONE) if row.lane in searched]
        found.sort(key=lambda row: (row.priority, row.run_at))
        return [DueJob(row.job_id, *row.lane) for row in found[:limit]]

    async def bury_unclaimable_job(self, _: object, *, job_id: int, **__: object) -> int:
        assert self.rows.pop(job_id).bad
        self.buried.add(job_id)
        return 0

    async def find_orphaned_claims(self, *_: object, **__: object) -> list[Any]:
        return []

    def start(self, attempt: Attempt) -> None:
        """Start the attempt. An attempt that was given back ends at once, and its job is due again."""
        if attempt.interruption is None:
            self.ends.append((self.now + self.dice.choice(self.durations), attempt))
            return
        row = self.taken.pop(attempt.claim.job_id)
        self.rows[row.job_id] = replace(row, visible_at=self.now)
        self.given_back_count += 1
        self.ends.append((self.now, attempt))

    # The table.

    def visible_rows(self) -> list[Row]:
        return [row for row in self.rows.values() if row.visible_at <= self.now]

    def due(self, skipped: Collection[int] = (), *, suspects: bool = False) -> list[Row]:
        return [
            row
            for row in self.visible_rows()
            if row.run_at <= self.now and row.suspect == suspects and row.job_id not in skipped
        ]

    def has_unknown_queue(self, known: Collection[str]) -> bool:
        return any(row.queue not in known for row in self.visible_rows())

    def as_claim(self, row: Row) -> Claim:
        self.ids += 1
        return Claim(
            row.job_id,
            row.handler,
            row.queue,
            row.priority,
            "{}",
            1,
            FenceToken(self.ids),
            at(row.run_at),
            at(self.now),
            None,
        )

    def insert(self) -> None:
        """Insert one job: on time, committed late, back-dated, or due later."""
        dice = self.dice
        self.ids += 1
        visible_at = self.now + dice.choice([0, 0, 0, 0.3, 2])
        run_at = dice.choice([self.now, self.now, self.now - 500, visible_at + dice.uniform(0, 2)])
        queue = dice.choice(["default"] * 6 + ["mail", "x", "y", *(f"tenant {n}" for n in range(6))])
        priority = dice.choice([5, 5, 5, 0, 9])
        self.rows[self.ids] = Row(
            self.ids,
            queue,
            dice.choice("ab"),
            priority,
            run_at,
            visible_at,
            suspect=dice.random() < 0.03,
            bad=dice.random() < 0.03,
        )

    # The clock and the invariants.

    def pass_time(self, seconds: float) -> bool:
        """Advance until the next attempt ends, at most `seconds`. Return whether an attempt has ended."""
        until = self.now + seconds
        waiting = [attempt.claim_sent_at for slots in self.running._slots.values() for attempt in slots.waiting]
        if waiting and min(waiting) + AHEAD_SECONDS <= min([until, *(end[0] for end in self.ends)]):
            self.now = max(self.now, min(waiting) + AHEAD_SECONDS + 1e-6)  # just past the limit
            self.running._give_back_waiting()
            return False
        due = [end for end in self.ends if end[0] <= until]
        if not due:
            self.now = until
            return False
        first = min(due, key=lambda end: end[0])
        self.now = max(self.now, first[0])
        self.ends.remove(first)
        first[1].ended_at = self.now
        self.running.free_slot(first[1])
        self.running.remove(first[1])
        return True

    def check_slots(self) -> None:
        for group, (taken, free) in self.running.slots().items():
            assert taken >= 0 <= free, f"{group}: more claims than slots"
            if not free:
                self.free_since.pop(group, None)
            else:
                self.free_since.setdefault(group, self.now)

    def waited_seconds(self, row: Row) -> float:
        return self.now - max(row.visible_at, row.run_at, self.failed_at)

    def max_wait(self, row: Row) -> float:
        pages = 1 + len({each.queue for each in self.visible_rows() if each.queue not in self.slots}) // PAGE
        return (POLL if row.queue in self.slots or pages == 1 else POLL * 2) + SLACK

    def check_order(self, claimed: Sequence[Row], skipped: Collection[int]) -> None:
        """Check that no job starts before a more urgent job of its group that has waited for a poll interval."""
        group = self.dispatcher._lanes.group
        for row in self.due(skipped):
            if row.queue not in self.slots or self.waited_seconds(row) <= POLL + SLACK:
                continue
            later = [each for each in claimed if group(each.queue) == group(row.queue) and each.priority > row.priority]
            assert not later, f"{later[0]} before {row}"

    def check_no_job_is_overlooked(self) -> None:
        """Check that no due job waits beside a free slot of its group for more than a poll interval."""
        for row in self.due(self.dispatcher._refused.job_ids):
            since = self.free_since.get(self.dispatcher._lanes.group(row.queue))
            if since is not None:
                assert min(self.waited_seconds(row), self.now - since) <= self.max_wait(row), (
                    f"{row} waits beside a free slot"
                )


class NoTelemetry:
    """Telemetry that discards every event."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def at(seconds: float) -> datetime:
    """Convert seconds of the model's clock to an instant."""
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize("seed", range(10))
async def test_no_sequence_of_cycles_overlooks_a_job_or_exceeds_the_slots(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers floors, sweeps, pages of queues and probation, with late, back-dated and refused jobs."""
    model = Model(seed)
    for timed in (dispatcher_module, running_module, refused_jobs_module):
        monkeypatch.setattr(timed, "boottime", model.boottime)
    monkeypatch.setattr(dispatcher_module, "connection", model.connection)
    for asking in (dispatcher_module, refused_jobs_module):
        monkeypatch.setattr(asking, "queries", model)
    monkeypatch.setattr(dispatcher_module, "backoff_pause", lambda _: 0.05)
    for module in (dispatcher_module, lanes_module):
        monkeypatch.setattr(module, "MAX_LISTED_QUEUES", 2 * PAGE)
    monkeypatch.setattr(lanes_module, "MAX_SEARCHED_QUEUES", PAGE)
    model.dispatcher._monitor.record_start(model.dispatcher.name)
    busy = 120
    for step in range(6000):
        if step < busy:
            for _ in range(model.dice.choice([0, 0, 0, 1, 1, 15])):
                model.insert()
        elif not model.rows and not model.ends:
            break
        pause = await model.dispatcher._look()
        model.check_slots()
        model.check_no_job_is_overlooked()
        if model.pass_time(min(pause, model.dice.choice([0.001, 0.1, 5]))) and not model.running._limited:
            model.pass_time(0.001)
        model.check_slots()
    unserved = {row.queue for row in model.rows.values()}
    assert unserved <= {queue for queue, slots in model.slots.items() if not slots}
    assert not model.ends
    model.now += LANE_IDLE_SECONDS + 1
    await model.dispatcher._look()
    assert not model.dispatcher._lanes._busy
    assert not model.running.probation
    assert not asyncio.all_tasks() - {asyncio.current_task()}
