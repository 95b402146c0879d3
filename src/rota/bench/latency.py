"""Measure how long a job waits: from just before its INSERT is sent until its handler is called."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import TYPE_CHECKING, Any

from rota.bench.daemons import daemons
from rota.bench.figures import Figures
from rota.bench.jobs import ARRIVE
from rota.db.connecting import close_connection, open_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import asyncpg

    from rota.bench.figures import Show
    from rota.bench.ground import Ground

WARM_UP = 1.0
"""Seconds of inserts that don't count: meanwhile, connections open and plans become stable."""

SEND = "insert into rota.jobs (handler, payload) values ($1, $2)"
ENDED = "select count(*) from rota.job_runs"
DELAYS = """
select (result #>> '{}')::int8 / 1e6 as start_ms, extract(epoch from started_at - scheduled_for) * 1e3 as claim_ms
from rota.job_runs
order by job_id
offset $1
"""


async def latency(ground: Ground, show: Show, *, rate: float, seconds: float, count: int, slots: int) -> Figures:
    """Insert single jobs at an even `rate`, each in a transaction of its own, and measure their delays."""
    warm, jobs = round(rate * WARM_UP), round(rate * seconds)
    async with daemons(ground, count=count, slots=slots) as running:
        await ground.tidy()
        db = await open_connection(ground.dsn)
        try:
            await _send(db, warm, rate, lambda _: None)
            before = await ground.counters(settled=True)
            with show.step(f"{jobs:,} jobs, {rate:g} a second", jobs) as tell:
                took = await _send(db, jobs, rate, tell)
            running.check()
            while int(str(await ground.ask(ENDED))) < warm + jobs:
                running.check()
                await asyncio.sleep(0.05)
        finally:
            await close_connection(db)
        ours = ground.asked + jobs  # the inserts
        rss = running.rss_mb()
        after = await ground.counters(settled=True)
        rows = await ground.db.fetch(DELAYS, warm)
        dead = await ground.dead_tuples()
    start = [float(row["start_ms"]) for row in rows]
    claim = [float(row["claim_ms"]) for row in rows]
    return Figures(
        jobs=jobs,
        seconds=seconds,
        start_p50_ms=percentile(start, 50),
        start_p99_ms=percentile(start, 99),
        start_max_ms=max(start),
        insert_p50_ms=percentile(took, 50),
        insert_p99_ms=percentile(took, 99),
        claim_p50_ms=percentile(claim, 50),
        claim_p99_ms=percentile(claim, 99),
        statements_per_job=(after.sent_since(before) - ours) / jobs,
        commits_per_job=(after.commits - before.commits - ours) / jobs,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / jobs,
        dead_tuples=dead,
        rss_mb=rss,
        daemons=count,
        slots=slots,
    )


async def _send(db: asyncpg.Connection, jobs: int, rate: float, tell: Callable[[int], None]) -> Sequence[float]:
    """Return how many milliseconds each insert took, its commit included."""
    statement = await db.prepare(SEND)
    loop = asyncio.get_running_loop()
    began, took = loop.time(), []
    for number in range(jobs):
        await asyncio.sleep(began + number / rate - loop.time())
        sent = time.monotonic_ns()
        await statement.fetch(ARRIVE, json.dumps({"sent": sent}))
        took.append((time.monotonic_ns() - sent) / 1e6)
        tell(1)
    return took


def percentile(values: Sequence[Any], per_cent: float) -> float:
    """Return the smallest value that at least `per_cent` percent of the values don't exceed."""
    return float(sorted(values)[max(0, math.ceil(len(values) * per_cent / 100) - 1)])
