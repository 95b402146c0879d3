"""Settle jobs whose lease has provably expired, expire jobs that did not start in time, and cancel waiting jobs on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.db import queries
from rota.db.pool import Connection, Pool, connection
from rota.domain.outcome import HolderLost
from rota.lifecycle.ending import cancel_waiting_jobs, expire_unstarted_jobs
from rota.lifecycle.settle import SUCCESS_BY_SETTLEMENT, settle_same_outcome
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from rota.observability.telemetry import Telemetry

BATCH = 500

MAX_CLOCK_GAIN_SECONDS = 2.0
"""If the database's clock gains more than this between two sweeps, expired leases prove nothing for one lease."""


class Reaper:
    """Service in every daemon. Several may run at once, because the statement that writes checks token, owner and expiry again."""

    name = "reaper"

    def __init__(
        self,
        pool: Pool,
        telemetry: Telemetry,
        *,
        interval: timedelta,
        lease: timedelta,
        random: Callable[[], float],
        alert: str | None,
        on_end: Callable[[int, bool | None], None],
    ) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self.interval: timedelta | None = interval
        self._lease = lease.total_seconds()
        self._random = random
        self._alert = alert
        self._on_end = on_end
        self._clocks: tuple[datetime, float] | None = None
        """The last reading of the database's clock, and when it was requested, on this node's clock."""
        self._wait_until = 0.0

    async def run_once(self) -> None:
        """Sweep once."""
        async with connection(self._pool) as db:
            requested_at = boottime()
            work = await queries.find_reaper_work(db)
            if self._is_clock_steady(work.now, requested_at):
                after_job_id = 0 if work.expired_leases else None
                while after_job_id is not None:
                    after_job_id = await self._reap(db, after_job_id)
            if work.missed_start_by:
                for job in await expire_unstarted_jobs(db, self._telemetry):
                    self._ended(job["schedule_id"], "bury")
            if work.cancel_requests:
                await cancel_waiting_jobs(db, self._telemetry)

    async def _reap(self, db: Connection, after_job_id: int) -> int | None:
        """Settle one batch as lost; return the last job_id if there may be more jobs, else None."""
        expired = await queries.find_expired_leases(db, beyond=after_job_id, limit=BATCH)
        settled = await settle_same_outcome(
            db, expired, HolderLost(), self._telemetry, random=self._random, expired_only=True, alert=self._alert
        )
        for terms, settlement in settled:
            self._telemetry.lease_reaped(job_id=terms.job_id, handler=terms.handler, settlement=settlement)
            self._ended(terms.schedule_id, settlement)
        return expired[-1].job_id if len(expired) == BATCH else None

    def _ended(self, schedule_id: int | None, settlement: str) -> None:
        if schedule_id is not None and settlement in SUCCESS_BY_SETTLEMENT:
            self._on_end(schedule_id, SUCCESS_BY_SETTLEMENT[settlement])

    def _is_clock_steady(self, now: datetime, requested_at: float) -> bool:
        """Return whether the database's clock has moved like this node's. After a jump ahead, wait for one lease."""
        answered_at = boottime()
        if self._clocks is not None:
            # Measured from request to answer, because a late answer is not a jump. Otherwise a blocked loop or a slow server
            # would keep every lease from being taken back.
            jumped_by = (now - self._clocks[0]).total_seconds() - (answered_at - self._clocks[1])
            if jumped_by > MAX_CLOCK_GAIN_SECONDS:
                self._wait_until = answered_at + self._lease
                self._telemetry.reaper_waits(jumped_by=jumped_by)
        self._clocks = (now, requested_at)
        return answered_at >= self._wait_until
