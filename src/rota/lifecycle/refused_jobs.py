"""Jobs whose claim the database refuses because of their rows: bury them, or set them aside for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg

from rota.db import queries
from rota.db.salvage import ROW_CLIENT_ERRORS, ChangeIgnored, Fault, fault_of
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.db.pool import Connection
    from rota.db.queries import Claimed, DueJob
    from rota.observability.telemetry import Telemetry

SET_ASIDE_SECONDS = 10.0
"""How long a job is not claimed again after the database refused its claim."""

SET_ASIDE_BLOCK = 100
"""For each block of this many jobs set aside, further ones wait SET_ASIDE_SECONDS longer.

With a fixed time, the first refused jobs would be tried again before the claims have reached the jobs behind the last one.
"""

MAX_SET_ASIDE = 10_000
"""At most this many jobs are set aside at a time, to bound the claim's parameters. Each claim tries further refused jobs again."""

IGNORED_SECONDS = 10.0
"""A job is refused if its claims have changed nothing for this long. A row that changes during a claim is claimed by the next."""

FORGET_SECONDS = 30.0
"""A job is forgotten if it was not found for this long after the time for which it was set aside."""

VALUE_ERRORS = (asyncpg.DataError, asyncpg.CheckViolationError, asyncpg.NotNullViolationError)
"""Server errors about a row's own values. An error with a context was raised by a trigger and does not count.

A claim can violate a constraint because rows stored before a NOT VALID constraint are checked at their next update.
"""


class RefusedJobs:
    """The jobs set aside on this node."""

    def __init__(
        self, telemetry: Telemetry, *, alert: str | None, job_ended: Callable[[int, bool | None], None] | None
    ) -> None:
        self._telemetry = telemetry
        self._alert = alert
        self._job_ended = job_ended
        self._until: dict[int, float] = {}
        """job_id -> when the job may be claimed again."""
        self._ignored: dict[int, tuple[float, float]] = {}
        """job_id -> when a claim first changed nothing, and when to forget that."""
        self._obstructed_until = 0.0
        self.obstacle: str | None = None
        """Why claims have no effect; None once one has."""

    def __len__(self) -> int:
        return len(self._until)

    @property
    def job_ids(self) -> list[int]:
        """The jobs that must not be claimed now."""
        return list(self._until)

    def drop_expired(self, now: float) -> None:
        """Allow the jobs to be claimed again whose time has passed."""
        self._until = {job_id: until for job_id, until in self._until.items() if until > now}
        self._ignored = {job_id: times for job_id, times in self._ignored.items() if times[1] > now}
        if now > self._obstructed_until:
            self.obstacle = None

    def add_ignored(self, claimed: Claimed) -> None:
        """Set aside the jobs whose claims have changed nothing for IGNORED_SECONDS."""
        if claimed.claims:
            self.obstacle = None
            if self._ignored:
                for claim in claimed.claims:
                    self._ignored.pop(claim.job_id, None)
        now = boottime()
        for job_id in claimed.ignored:
            first_ignored_at, _ = self._ignored.get(job_id, (now, now))
            seconds = 0.0
            if now - first_ignored_at >= IGNORED_SECONDS:
                seconds = self._set_aside(job_id)
                self._obstructed_until = now + seconds + FORGET_SECONDS
                if not claimed.claims:
                    ignored_for = now - first_ignored_at
                    self.obstacle = (
                        f"of job {job_id} have changed nothing for {ignored_for:.0f} s: a trigger drops the change"
                    )
                self._telemetry.row_refused("claim", ChangeIgnored(), again_in=seconds, job_id=job_id)
            if job_id in self._ignored or len(self._ignored) < MAX_SET_ASIDE:
                self._ignored[job_id] = first_ignored_at, now + seconds + FORGET_SECONDS

    async def add(self, db: Connection, job: DueJob, error: Exception) -> None:
        """Bury a job whose own values make its claim fail. Set it aside if a trigger or a constraint refuses the claim."""
        kind = type(error).__name__
        if isinstance(error, ROW_CLIENT_ERRORS) or (isinstance(error, VALUE_ERRORS) and error.context is None):
            attempts = await self._bury(db, job, kind)
            if attempts is not None:
                self._report_buried(job, kind, attempts)
                return
        seconds = self._set_aside(job.job_id)
        self._telemetry.row_refused("claim", error, again_in=seconds, **job._asdict())

    def _set_aside(self, job_id: int) -> float:
        """Set a job aside; return for how many seconds."""
        if (count := len(self._until)) >= MAX_SET_ASIDE:
            return 0.0
        seconds = SET_ASIDE_SECONDS * (1 + count // SET_ASIDE_BLOCK)
        self._until[job_id] = boottime() + seconds
        return seconds

    async def _bury(self, db: Connection, job: DueJob, kind: str) -> int | None:
        try:
            return await queries.bury_unclaimable_job(
                db,
                job_id=job.job_id,
                error_kind=kind,
                error="the database can't claim this job because of its own values, such as an interval out of range",
                alert=self._alert,
            )
        except asyncpg.PostgresError as refused:
            if fault_of(refused) is not Fault.ROW:
                raise
            return None

    def _report_buried(self, job: DueJob, kind: str, attempts: int) -> None:
        self._telemetry.job_settled(
            job_id=job.job_id,
            handler=job.handler,
            queue=job.queue,
            settlement="dead",
            outcome="unclaimable",
            attempt=attempts,
            seconds=None,
            kind=kind,
            reason="permanent",
            do=f"rota dead show {job.job_id}, and discard it",
        )
        if job.schedule_id is not None and self._job_ended is not None:
            self._job_ended(job.schedule_id, False)
