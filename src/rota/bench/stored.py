"""Measure the poll for due schedules when many are stored and none is due, and the cost of an idle daemon."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rota.bench.daemons import daemons
from rota.bench.figures import Figures
from rota.bench.jobs import NOOP
from rota.bench.latency import percentile
from rota.bench.schedules import store_schedules
from rota.db import schedule_queries, schedule_reports
from rota.db.connecting import close_connection, open_connection
from rota.db.schedule_queries import NO_FLOOR
from rota.db.sessions import PLANS
from rota.domain.shards import EVERY_SHARD
from rota.lifecycle.scheduler import BATCH, OVERDUE_AFTER

if TYPE_CHECKING:
    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

FEW_SCHEDULES = 1000
POLLS = 300
STARTUP_SECONDS = 8.0
"""After this time, a daemon has opened its connections, registered, and run every service once."""

POLL_ARGUMENTS: schedule_queries.DueSchedulesQuery = {
    "shards": EVERY_SHARD,
    "overdue": OVERDUE_AFTER,
    "turn": 0,
    "floor": NO_FLOOR,
    "limit": BATCH,
    "horizon": timedelta(seconds=1),
}


@dataclass(frozen=True, slots=True)
class PollCost:
    """The cost of one poll: pages read, and the median time in milliseconds as a daemon sees it."""

    pages: int
    ms: float


async def measure_stored(
    database: BenchDatabase, reporter: Reporter, *, schedules: int, count: int, seconds: float
) -> Figures:
    """Store schedules, and compare a poll of all with a poll of FEW_SCHEDULES. Then measure idle daemons for `seconds` seconds."""
    few = min(FEW_SCHEDULES, schedules)
    with reporter.progress("schedules stored", schedules) as advance:
        await store_schedules(database, advance, first=1, last=few, handler=NOOP)
        at_few = await _measure_poll(database)
        await store_schedules(database, advance, first=few + 1, last=schedules, handler=NOOP)
        at_all = await _measure_poll(database)
    async with daemons(database, count=count, slots=100) as running:
        await asyncio.sleep(STARTUP_SECONDS)
        before, cpu_before = await database.read_counters(wait_for_flush=True), running.cpu_seconds()
        with reporter.progress(f"idle for {seconds:g} s", round(seconds)) as advance:
            started_at = time.monotonic()
            while (left := started_at + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(1.0, left))
                advance(1)
        cpu_seconds = (running.cpu_seconds() - cpu_before) / count
        took = time.monotonic() - started_at
        running.check_running()
        rss = running.rss_mb()
        after = await database.read_counters(wait_for_flush=False)
    own_statements = 2  # the counters themselves
    return Figures(
        schedules=schedules,
        seconds=took,
        look_ms=at_all.ms,
        look_ms_at_few=at_few.ms,
        look_pages=at_all.pages,
        look_pages_at_few=at_few.pages,
        idle_core_percent=cpu_seconds / took * 100,
        idle_statements_per_second=(after.sent_since(before) - own_statements) / took / count,
        rss_mb=rss,
        daemons=count,
    )


async def _measure_poll(database: BenchDatabase) -> PollCost:
    db = await open_connection(database.dsn, server_settings=PLANS)
    try:
        poll_ms = []
        for _ in range(POLLS):
            started_at = time.perf_counter()
            await schedule_queries.take_due_schedules(db, **POLL_ARGUMENTS)
            poll_ms.append((time.perf_counter() - started_at) * 1e3)
        pages = await schedule_reports.count_pages_read(db, **POLL_ARGUMENTS)
    finally:
        await close_connection(db)
    return PollCost(pages, percentile(poll_ms, 50))
