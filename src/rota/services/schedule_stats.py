"""Store on schedules when a job last succeeded, and how many have failed since then."""

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

NO_PAUSE = timedelta(0)

LOCKED_RETRY_SECONDS = 0.2
"""Pause before schedules are tried again whose rows another session has locked."""


class ScheduleStats:
    """Service: writes all ends of jobs that were queued while the previous statement ran.

    Settlements do not write these columns, because they must never wait for a schedule's row. Throttled, so a spike of fires
    leaves 90 % of the time to the jobs. If a node dies, its unwritten statistics are lost, but no job. A node that drains writes
    all of them.
    """

    name = "track record"
    interval: timedelta | None = None

    def __init__(self, pool: Pool, telemetry: Telemetry) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self._ended: dict[int, tuple[bool, int]] = {}
        self._has_queued = asyncio.Event()
        self._lock = asyncio.Lock()

    def add(self, schedule_id: int, succeeded: bool) -> None:
        """Queue the end of a schedule's job: a success, or a dead letter."""
        before, failures = self._ended.get(schedule_id, (False, 0))
        self._ended[schedule_id] = (True, 0) if succeeded else (before, failures + 1)
        self._has_queued.set()

    async def run_once(self) -> None:
        """Wait for ends of jobs, and write all that are queued."""
        await self._has_queued.wait()
        self._has_queued.clear()
        began = boottime()
        unwritten = await self._write()
        await asyncio.sleep(
            LOCKED_RETRY_SECONDS if unwritten else throttled_interval(NO_PAUSE, took=boottime() - began).total_seconds()
        )

    async def finish(self) -> None:
        """Write all that are queued, without pauses, when no more will come. Schedules locked by another session are skipped."""
        while not await self._write() and self._ended:
            pass

    async def _write(self) -> set[int]:
        """Write one batch; return the schedules whose rows are locked, which are queued again."""
        async with self._lock:
            batch = sorted(self._ended)[:BATCH]
            if not batch:
                return set()
            outcomes = [(schedule_id, *self._ended.pop(schedule_id)) for schedule_id in batch]
            unwritten = set(batch)
            try:
                async with connection(self._pool) as db:
                    unwritten = set().union(
                        *await salvage(outcomes, partial(schedule_queries.note_fire_outcomes, db), self._refuse)
                    )
            finally:
                for schedule_id, succeeded, failures in outcomes:
                    if schedule_id in unwritten:
                        self._queue_again(schedule_id, succeeded, failures)
                if self._ended:
                    self._has_queued.set()
        return unwritten

    async def _refuse(self, outcome: tuple[int, bool, int], error: Exception) -> set[int]:
        """Drop the outcome of a schedule whose row can't be written."""
        self._telemetry.row_refused("track record", error, schedule_id=outcome[0])
        return set()

    def _queue_again(self, schedule_id: int, succeeded: bool, failures: int) -> None:
        queued_meanwhile = self._ended.get(schedule_id)
        if queued_meanwhile is None:
            self._ended[schedule_id] = (succeeded, failures)
        elif not queued_meanwhile[0]:
            self._ended[schedule_id] = (succeeded, failures + queued_meanwhile[1])
