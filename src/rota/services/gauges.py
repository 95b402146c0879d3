"""Sample what a scrape shows of the whole installation. A scrape never queries the database."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.clock import boottime
from rota.db import queries, reports, schedule_queries
from rota.db.pool import Pool, connection
from rota.loop import rest

if TYPE_CHECKING:
    from rota.lifecycle.running import Running
    from rota.loop import Pulse
    from rota.telemetry import Telemetry

SAMPLED_EVERY = timedelta(seconds=15)

TOLD_EVERY = 3600.0
"""Seconds between two warnings about the same jobs that nobody claims."""


class Gauges:
    """Service: the database's part, bounded in time and cost."""

    name = "gauges"
    interval: timedelta | None = SAMPLED_EVERY

    def __init__(self, pool: Pool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self.sampled = boottime()
        self._unclaimed: set[tuple[str, str]] = set()
        self._told: dict[tuple[str, str], float] = {}

    async def run_once(self) -> None:
        """Sample once, and tell of due jobs that nobody would claim."""
        began = boottime()
        async with connection(self._pool) as db:
            sample = await queries.sample_backlog(db)
            upkeep = await queries.sample_upkeep(db)
            unclaimed = sample.pop("unclaimed")
            if fresh := self._to_tell(set(unclaimed), began):
                nodes, known = await reports.list_nodes(db), await reports.list_handler_names(db)
                for queue, handler in sorted(fresh):
                    if why := reports.why_unclaimed(handler, queue, nodes, known):
                        due = int(unclaimed[queue, handler])
                        self._telemetry.jobs_unclaimed(queue=queue, handler=handler, due=due, why=why)
            states, last_success = await schedule_queries.sample_schedules(db)
        self._telemetry.backlog_sampled(**sample)
        self._telemetry.schedules_sampled(states=states, last_success=last_success)
        self._telemetry.upkeep_sampled(**upkeep)
        self.sampled = boottime()
        self.interval = rest(SAMPLED_EVERY, took=self.sampled - began)

    def _to_tell(self, unclaimed: set[tuple[str, str]], now: float) -> set[tuple[str, str]]:
        """Return what has been unclaimed twice in a row, and wasn't told of within the hour.

        Once is no news: while a fleet starts, one daemon is up before the one that has the handler.
        """
        self._told = {lane: told for lane, told in self._told.items() if now - told < TOLD_EVERY}
        fresh = {lane for lane in unclaimed & self._unclaimed if lane not in self._told}
        self._unclaimed = unclaimed
        self._told |= dict.fromkeys(fresh, now)
        return fresh


class LocalGauges:
    """Service: what this node knows by itself."""

    name = "local gauges"
    interval: timedelta | None = timedelta(seconds=1)

    def __init__(self, telemetry: Telemetry, running: Running, pulse: Pulse, gauges: Gauges) -> None:
        self._telemetry = telemetry
        self._running = running
        self._pulse = pulse
        self._gauges = gauges

    async def run_once(self) -> None:
        """Show slots, and the ages of services and samples."""
        now = boottime()
        self._telemetry.slots_sampled(self._running.slots())
        # A copy, for the heartbeat's thread enters itself while we start.
        for service, succeeded in self._pulse.succeeded.copy().items():
            self._telemetry.service_aged(service, timedelta(seconds=now - succeeded))
        self._telemetry.sample_aged(timedelta(seconds=now - self._gauges.sampled))
