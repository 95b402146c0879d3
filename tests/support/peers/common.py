"""Shared by the Python programs: the count of finished jobs, the deadline and the printed result.

A program gets the settings to use ("default" or "best") and the number of jobs as arguments, and its database in
PGHOST, PGPORT, PGUSER and PGDATABASE. It prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IS_BEST = sys.argv[1] == "best"
JOBS = int(sys.argv[2])
MAX_SECONDS = float(sys.argv[3])
BATCH = 1000


async def analyze() -> None:
    """Update the planner's statistics, so that no system's plans suffer from a table that has just been filled."""
    db = await asyncpg.connect()
    await db.execute("vacuum (analyze)")
    await db.close()


class Jobs:
    """Counts the jobs that handlers have run."""

    def __init__(self) -> None:
        self.ended = 0
        self._started_at = time.perf_counter()
        self._all_ended = asyncio.Event()

    def start(self) -> None:
        """Start the clock: the backlog is stored, and the worker starts now."""
        self._started_at = time.perf_counter()

    def count(self) -> None:
        """Count one job. Handlers call this."""
        self.ended += 1
        if self.ended >= JOBS:
            self._all_ended.set()

    async def wait_and_report(self, package: str, settings: str, count_left: Callable[[], Awaitable[int]]) -> None:
        """Wait until all jobs are settled in the database, or the time is over. Print the rate and end the process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_SECONDS):
                await self._all_ended.wait()
                while await count_left():  # noqa: ASYNC110  the database has no event
                    await asyncio.sleep(0.02)
        rate = self.ended / (time.perf_counter() - self._started_at)
        json.dump({"version": version(package), "settings": settings, "jobs_per_second": rate}, sys.stdout)
        sys.stdout.flush()
        os._exit(0)
