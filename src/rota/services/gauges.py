"""Sample what a scrape shows of the whole installation. A scrape never queries the database."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.clock import boottime
from rota.db import queries
from rota.db.pool import Pool, connection
from rota.loop import rest

if TYPE_CHECKING:
    from rota.lifecycle.running import Running
    from rota.loop import Pulse
    from rota.telemetry import Telemetry

SAMPLED_EVERY = timedelta(seconds=10)


class Gauges:
    """Service: the database's part, bounded in time and cost."""

    name = "gauges"
    interval: timedelta | None = SAMPLED_EVERY

    def __init__(self, pool: Pool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self.sampled = boottime()

    async def run_once(self) -> None:
        """Sample once."""
        began = boottime()
        async with connection(self._pool) as db:
            sample = await queries.sample_backlog(db)
            states, last_success = await queries.sample_schedules(db)
        self._telemetry.backlog_sampled(**sample)
        self._telemetry.schedules_sampled(states=states, last_success=last_success)
        self.sampled = boottime()
        self.interval = rest(SAMPLED_EVERY, took=self.sampled - began)


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
        for service, succeeded in self._pulse.succeeded.items():
            self._telemetry.service_aged(service, timedelta(seconds=now - succeeded))
        self._telemetry.sample_aged(timedelta(seconds=now - self._gauges.sampled))
