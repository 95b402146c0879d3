"""Measure the start delay of single jobs: from just before the INSERT is sent until the handler is called."""

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

    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

WARM_UP_SECONDS = 1.0
"""Inserts in this time are not measured: connections still open, and plans change."""

INSERT_JOB = "insert into rota.jobs (handler, payload) values ($1, $2)"
COUNT_ENDED = "select count(*) from rota.job_runs"
DELAYS = """
select (result #>> '{}')::int8 / 1e6 as start_ms, extract(epoch from started_at - scheduled_for) * 1e3 as claim_ms
from rota.job_runs
order by job_id
offset $1
"""


async def measure_latency(
    database: BenchDatabase, reporter: Reporter, *, rate: float, seconds: float, count: int, slots: int
) -> Figures:
    """Insert single jobs at a constant rate per second, each in its own transaction, and measure their delays."""
    warm_up_jobs, jobs = round(rate * WARM_UP_SECONDS), round(rate * seconds)
    async with daemons(database, count=count, slots=slots) as running:
        await database.vacuum()
        db = await open_connection(database.dsn)
        try:
            await _send(db, warm_up_jobs, rate, lambda _: None)
            before = await database.read_counters(wait_for_flush=True)
            with reporter.progress(f"{jobs:,} jobs, {rate:g} a second", jobs) as advance:
                insert_ms = await _send(db, jobs, rate, advance)
            running.check_running()
            while int(str(await database.fetch_value(COUNT_ENDED))) < warm_up_jobs + jobs:
                running.check_running()
                await asyncio.sleep(0.05)
        finally:
            await close_connection(db)
        own_statements = database.own_statements + jobs  # the inserts
        rss = running.rss_mb()
        after = await database.read_counters(wait_for_flush=True)
        rows = await database.connection.fetch(DELAYS, warm_up_jobs)
        dead = await database.count_dead_tuples()
    start_ms = [float(row["start_ms"]) for row in rows]
    claim_ms = [float(row["claim_ms"]) for row in rows]
    return Figures(
        jobs=jobs,
        seconds=seconds,
        start_p50_ms=percentile(start_ms, 50),
        start_p99_ms=percentile(start_ms, 99),
        start_max_ms=max(start_ms),
        insert_p50_ms=percentile(insert_ms, 50),
        insert_p99_ms=percentile(insert_ms, 99),
        claim_p50_ms=percentile(claim_ms, 50),
        claim_p99_ms=percentile(claim_ms, 99),
        statements_per_job=(after.sent_since(before) - own_statements) / jobs,
        commits_per_job=(after.commits - before.commits - own_statements) / jobs,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / jobs,
        dead_tuples=dead,
        rss_mb=rss,
        daemons=count,
        slots=slots,
    )


async def _send(db: asyncpg.Connection, jobs: int, rate: float, advance: Callable[[int], None]) -> Sequence[float]:
    """Insert jobs at a constant rate per second. Return the milliseconds that each insert took, with its commit."""
    statement = await db.prepare(INSERT_JOB)
    loop = asyncio.get_running_loop()
    started_at, insert_ms = loop.time(), []
    for number in range(jobs):
        await asyncio.sleep(started_at + number / rate - loop.time())
        sent = time.monotonic_ns()
        await statement.fetch(ARRIVE, json.dumps({"sent": sent}))
        insert_ms.append((time.monotonic_ns() - sent) / 1e6)
        advance(1)
    return insert_ms


def percentile(values: Sequence[Any], per_cent: float) -> float:
    """Return the smallest of the values that is at least as large as `per_cent` percent of them."""
    return float(sorted(values)[max(0, math.ceil(len(values) * per_cent / 100) - 1)])
