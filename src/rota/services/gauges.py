"""Sample the gauges about the whole installation and about this node. A scrape never queries the database."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rota.db import node_reports, queries, reports, schedule_queries
from rota.db.pool import Pool, connection
from rota.observability import log_writer
from rota.runtime.clock import boottime
from rota.supervision.loop import throttled_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rota.lifecycle.running import Running
    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

SAMPLE_INTERVAL = timedelta(seconds=15)

STALE_AFTER_SECONDS = 60.0
"""A sample is hidden after this time, or after twice the interval if that is longer."""

WARN_AGAIN_SECONDS = 3600.0
"""Pause between two warnings about the same unclaimed jobs."""


MAX_COUNTED_JOBS = 100_000
"""A sample counts exactly up to this many live jobs."""

MAX_SEARCHED_LANES = 2_000
"""With more live jobs than that, a sample searches at most this many (lane, priority) pairs."""

MAX_REPORTED_LANES = 20
"""One sample warns about at most this many lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnclaimedJobs:
    """The due jobs that no living daemon would claim."""

    unclaimable: int
    """Their handler is on no living daemon."""
    unserved: int
    """No daemon that has their handler serves their queue."""
    lanes: Mapping[tuple[str, str], int]
    """(queue, handler) -> due jobs, of the largest MAX_REPORTED_LANES lanes."""


def find_unclaimed_jobs(backlog: reports.Backlog, nodes: Sequence[node_reports.LivingNode]) -> UnclaimedJobs:
    """Find the due jobs that none of the living daemons would claim."""
    handlers = {name for node in nodes for name in node.handlers}
    unclaimable = sum(lane.due for lane in backlog.unnamed if not lane.registered)
    unserved = sum(
        lane.due
        for lane in backlog.unnamed
        if lane.registered and not any(node.claims_from(lane.queue) for node in nodes)
    )
    lanes = {}
    for lane in backlog.by_handler:
        due = lane.due + lane.limited
        if not due:
            continue
        if lane.handler not in handlers:
            unclaimable += due
        elif not any(node.claims(lane.handler, lane.queue) for node in nodes):
            unserved += due
        else:
            continue
        lanes[lane.queue, lane.handler] = due
    largest = sorted(lanes, key=lambda lane: (-lanes[lane], lane))[:MAX_REPORTED_LANES]
    return UnclaimedJobs(unclaimable=unclaimable, unserved=unserved, lanes={lane: lanes[lane] for lane in largest})


class Gauges:
    """Service: sample the database for the gauges, at a bounded cost."""

    name = "gauges"
    interval: timedelta | None = SAMPLE_INTERVAL

    def __init__(self, pool: Pool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self.sampled_at = boottime()
        self.valid_until = self.sampled_at + STALE_AFTER_SECONDS
        """The sampled gauges are hidden after this time, so that an old value does not look like a current one."""
        self._unclaimed_before: set[tuple[str, str]] = set()
        self._warned_at: dict[tuple[str, str], float] = {}

    async def run_once(self) -> None:
        """Sample once, and warn of due jobs that no living daemon would claim."""
        began = boottime()
        async with connection(self._pool) as db:
            backlog = await reports.summarise_live_jobs(db, counted=MAX_COUNTED_JOBS, explored=MAX_SEARCHED_LANES)
            nodes = await node_reports.list_nodes(db)
            dead_letters = await queries.sample_backlog(db)
            upkeep = await queries.sample_upkeep(db)
            unclaimed_jobs = find_unclaimed_jobs(backlog, nodes)
            if lanes_to_warn_about := self._lanes_to_warn_about(set(unclaimed_jobs.lanes), began):
                known = await node_reports.list_handler_names(db)
                for queue, handler in sorted(lanes_to_warn_about):
                    if why := node_reports.why_unclaimed(handler, queue, nodes, known):
                        due = unclaimed_jobs.lanes[queue, handler]
                        self._telemetry.jobs_unclaimed(queue=queue, handler=handler, due=due, why=why)
            states, last_success = await schedule_queries.sample_schedules(db)
        self._telemetry.backlog_sampled(
            **backlog_gauges(backlog),
            **dead_letters,
            unclaimable=unclaimed_jobs.unclaimable,
            unserved=unclaimed_jobs.unserved,
        )
        self._telemetry.schedules_sampled(states=states, last_success=last_success)
        self._telemetry.upkeep_sampled(**upkeep)
        self.sampled_at = boottime()
        self.interval = throttled_interval(SAMPLE_INTERVAL, took=self.sampled_at - began)
        self.valid_until = self.sampled_at + max(STALE_AFTER_SECONDS, 2 * self.interval.total_seconds())

    def _lanes_to_warn_about(self, unclaimed: set[tuple[str, str]], now: float) -> set[tuple[str, str]]:
        """Return the lanes that were unclaimed in two samples in a row, without a warning in the last WARN_AGAIN_SECONDS.

        One sample is not enough: while a fleet starts, the daemon with the handler may come up last.
        """
        self._warned_at = {
            lane: warned_at for lane, warned_at in self._warned_at.items() if now - warned_at < WARN_AGAIN_SECONDS
        }
        lanes_to_warn_about = {lane for lane in unclaimed & self._unclaimed_before if lane not in self._warned_at}
        self._unclaimed_before = unclaimed
        self._warned_at |= dict.fromkeys(lanes_to_warn_about, now)
        return lanes_to_warn_about


def backlog_gauges(backlog: reports.Backlog) -> dict[str, Any]:
    """Return the arguments about live jobs for `Telemetry.backlog_sampled`."""
    jobs: defaultdict[tuple[str, str], int] = defaultdict(int)
    limited: defaultdict[str, int] = defaultdict(int)
    oldest_due: defaultdict[tuple[str, str], float] = defaultdict(float)
    oldest_running: defaultdict[str, float] = defaultdict(float)
    for lane in (*backlog.lanes, *backlog.unnamed):
        for state in ("due", "running", "retrying", "future"):
            if count := getattr(lane, state):
                jobs[lane.queue, state] += count
        if lane.limited:
            limited[lane.queue] += lane.limited
        if lane.oldest_due is not None:
            key = lane.queue, str(lane.priority)
            oldest_due[key] = max(oldest_due[key], lane.oldest_due.total_seconds())
        if lane.oldest_running is not None:
            oldest_running[lane.queue] = max(oldest_running[lane.queue], lane.oldest_running.total_seconds())
    return {
        "jobs": jobs,
        "limited": limited,
        "oldest_due": oldest_due,
        "oldest_running": oldest_running,
        "expired": sum(lane.expired for lane in (*backlog.lanes, *backlog.unnamed)),
        "at_least": backlog.at_least,
    }


class LocalGauges:
    """Service: samples the gauges about this node."""

    name = "local gauges"
    interval: timedelta | None = timedelta(seconds=1)

    def __init__(
        self, telemetry: Telemetry, running: Running, monitor: ServiceMonitor, gauges: Callable[[], Gauges]
    ) -> None:
        self._telemetry = telemetry
        self._running = running
        self._monitor = monitor
        self._gauges = gauges

    async def run_once(self) -> None:
        """Show slots, and the ages of services and samples."""
        now = boottime()
        self._telemetry.slots_sampled(self._running.slots())
        self._telemetry.log_lines_dropped(log_writer.dropped())
        # A copy, because the heartbeat's thread may add its entry during the iteration.
        for service, succeeded in self._monitor.last_success_at.copy().items():
            self._telemetry.service_aged(service, timedelta(seconds=now - succeeded))
        gauges = self._gauges()
        self._telemetry.sample_aged(timedelta(seconds=now - gauges.sampled_at), stale=now > gauges.valid_until)
