"""Note on schedules how their jobs ended: when one last succeeded, and how many have failed since."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from rota.db import schedule_queries
from rota.db.pool import Pool, connection
from rota.db.salvage import salvage
from rota.runtime.clock import boottime
from rota.supervision.loop import throttled_interval

if TYPE_CHECKING:
    from rota.observability.telemetry import Telemetry

BATCH = 5000

AT_ONCE = timedelta(0)

LOCKED_PAUSE = 0.2
"""Seconds until schedules whose rows somebody holds locked are tried again."""


class ScheduleStats:
    """Service: one statement carries whatever gathered during the last one.

    Beside the settlements and not in them: those must never wait for a schedule's row, nor pay for it. In a spike of fires
    it keeps to a tenth of the time, and leaves the rest to the jobs. What a node had not noted yet when it died is lost,
    which costs a `last_success_at` and no job; one that stops in order notes it all.
    """

    name = "track record"
    interval: timedelta | None = None

    def __init__(self, pool: Pool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self._ended: dict[int, tuple[bool, int]] = {}
        self._some = asyncio.Event()
        self._alone = asyncio.Lock()

    def add(self, schedule_id: int, succeeded: bool) -> None:
        """Take the end of a schedule's job: a success, or a dead letter."""
        before, failures = self._ended.get(schedule_id, (False, 0))
        self._ended[schedule_id] = (True, 0) if succeeded else (before, failures + 1)
        self._some.set()

    async def run_once(self) -> None:
        """Wait for ends of jobs, and write what has gathered."""
        await self._some.wait()
        self._some.clear()
        began = boottime()
        left = await self._write()
        await asyncio.sleep(
            LOCKED_PAUSE if left else throttled_interval(AT_ONCE, took=boottime() - began).total_seconds()
        )

    async def finish(self) -> None:
        """Write all that is left, without rests, once no more will come. What somebody holds locked then is lost."""
        while not await self._write() and self._ended:
            pass

    async def _write(self) -> set[int]:
        """Write one batch; return whose rows are locked: they come again."""
        async with self._alone:
            batch = sorted(self._ended)[:BATCH]
            if not batch:
                return set()
            outcomes = [(schedule_id, *self._ended.pop(schedule_id)) for schedule_id in batch]
            left = set(batch)
            try:
                async with connection(self._pool) as db:
                    left = set().union(
                        *await salvage(outcomes, partial(schedule_queries.note_fire_outcomes, db), self._refuse)
                    )
            finally:
                for schedule_id, succeeded, failures in outcomes:
                    if schedule_id in left:
                        self._come_again(schedule_id, succeeded, failures)
                if self._ended:
                    self._some.set()
        return left

    async def _refuse(self, outcome: tuple[int, bool, int], error: Exception) -> set[int]:
        """Drop the outcome of a schedule whose row can't be written."""
        self._telemetry.row_refused("track record", error, schedule_id=outcome[0])
        return set()

    def _come_again(self, schedule_id: int, succeeded: bool, failures: int) -> None:
        since = self._ended.get(schedule_id)
        if since is None:
            self._ended[schedule_id] = (succeeded, failures)
        elif not since[0]:
            self._ended[schedule_id] = (succeeded, failures + since[1])
