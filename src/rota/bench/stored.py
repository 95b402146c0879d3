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
from rota.bench.schedules import plant
from rota.db import schedule_queries, schedule_reports
from rota.db.connecting import close_connection, open_connection
from rota.db.schedule_queries import NO_FLOOR
from rota.db.sessions import PLANS
from rota.domain.shards import EVERY_SHARD
from rota.lifecycle.scheduler import BATCH, OVERDUE_AFTER

if TYPE_CHECKING:
    from rota.bench.figures import Show
    from rota.bench.ground import Ground

FEW = 1000
LOOKS = 300
STARTUP_SECONDS = 8.0
"""After this time, a daemon has opened its connections, registered, and run every service once."""

LOOK: schedule_queries.DueSchedulesQuery = {
    "shards": EVERY_SHARD,
    "overdue": OVERDUE_AFTER,
    "turn": 0,
    "floor": NO_FLOOR,
    "limit": BATCH,
    "horizon": timedelta(seconds=1),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one poll: pages read, and the median time in milliseconds as a daemon sees it."""

    pages: int
    ms: float


async def stored(ground: Ground, show: Show, *, schedules: int, count: int, seconds: float) -> Figures:
    """Store schedules, and compare a poll of all with a poll of a thousand. Then watch idle daemons for `seconds` seconds."""
    few = min(FEW, schedules)
    with show.step("schedules stored", schedules) as tell:
        await plant(ground, tell, first=1, last=few, handler=NOOP)
        at_few = await _look(ground)
        await plant(ground, tell, first=few + 1, last=schedules, handler=NOOP)
        at_all = await _look(ground)
    async with daemons(ground, count=count, slots=100) as running:
        await asyncio.sleep(STARTUP_SECONDS)
        before, used = await ground.counters(settled=True), running.cpu_seconds()
        with show.step(f"idle for {seconds:g} s", round(seconds)) as tell:
            began = time.monotonic()
            while (left := began + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(1.0, left))
                tell(1)
        used = (running.cpu_seconds() - used) / count
        took = time.monotonic() - began
        running.check()
        rss = running.rss_mb()
        after = await ground.counters(settled=False)
    ours = 2  # the counters themselves
    return Figures(
        schedules=schedules,
        seconds=took,
        look_ms=at_all.ms,
        look_ms_at_few=at_few.ms,
        look_pages=at_all.pages,
        look_pages_at_few=at_few.pages,
        idle_core_percent=used / took * 100,
        idle_statements_per_second=(after.sent_since(before) - ours) / took / count,
        rss_mb=rss,
        daemons=count,
    )


async def _look(ground: Ground) -> Cost:
    db = await open_connection(ground.dsn, server_settings=PLANS)
    try:
        took = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            await schedule_queries.take_due_schedules(db, **LOOK)
            took.append((time.perf_counter() - began) * 1e3)
        pages = await schedule_reports.count_pages_read(db, **LOOK)
    finally:
        await close_connection(db)
    return Cost(pages, percentile(took, 50))
