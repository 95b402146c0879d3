"""Measure how long single jobs, the probes, wait behind a backlog that fills every slot.

Each probe is the first job of its lane (queue, handler, priority). This is the hard case, because only a sweep finds it. Urgent
probes have a smaller priority than the backlog. Equal probes have its priority, another handler, and the earliest run_at of all.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING

from rota.bench.daemons import daemons
from rota.bench.figures import Figures
from rota.bench.jobs import QUEUE
from rota.bench.latency import percentile
from rota.bench.priority_app import BACKLOG_HANDLER, PROBE_HANDLERS
from rota.db.connecting import close_connection, open_connection
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

SLOTS = 100
"""The default."""

BACKLOG_PRIORITY = 5
URGENT_LANES = [(handler, priority) for priority in range(BACKLOG_PRIORITY) for handler in PROBE_HANDLERS]
EQUAL_EVERY = 5
"""Every fifth probe is an equal one."""

MAX_PROBES = EQUAL_EVERY * len(PROBE_HANDLERS)
"""Each probe needs its own lane."""

PAUSE_SECONDS = (0.1, 0.3)
"""Range of the random pause between two probes. A constant pause could coincide with the daemon's polls."""

INSERT_BACKLOG = """
insert into rota.jobs (handler, payload)
select $1, jsonb_build_object('milliseconds', $2::int4) from generate_series(1, $3::int4)
"""
JOBS_PER_INSERT = 1000
INSERT_PROBE = (
    "insert into rota.jobs (handler, payload, priority, run_at) values ($1, $2, $3, now() - $4 * interval '1 day')"
)
BACKLOG_REMAINS = "select exists (select from rota.jobs where handler = $1 and state = 'scheduled')"
ENDED_PROBES = """
select handler, (result #>> '{}')::int8 / 1e6 as start_ms, scheduled_for < started_at - interval '12 hours' as equal
from rota.job_runs
where handler = any ($1)
"""


async def measure_priority(
    database: BenchDatabase, reporter: Reporter, *, jobs: int, probes: int, milliseconds: int
) -> Figures:
    """Measure the start delay of probes behind `jobs` due jobs, each of which takes `milliseconds`."""
    async with daemons(database, count=1, slots=SLOTS, app="rota.bench.priority_app:app") as running:
        await database.fetch_value("select rota.pause_queue($1, 'until the backlog is stored')", QUEUE)
        await database.vacuum()
        with reporter.progress(f"{jobs:,} jobs stored", jobs) as advance:
            for done in range(0, jobs, JOBS_PER_INSERT):
                count = min(JOBS_PER_INSERT, jobs - done)
                await database.connection.execute(INSERT_BACKLOG, BACKLOG_HANDLER, milliseconds, count)
                advance(count)
        await database.fetch_value("select rota.resume_queue($1)", QUEUE)
        db = await open_connection(database.dsn)
        started_at = time.perf_counter()
        try:
            with reporter.progress("probes", probes) as advance:
                sent = await _send(database, db, probes, advance)
            while len(rows := await database.connection.fetch(ENDED_PROBES, PROBE_HANDLERS)) < sent:
                running.check_running()
                await asyncio.sleep(0.1)
            seconds = time.perf_counter() - started_at
        finally:
            await close_connection(db)
        rss = running.rss_mb()
    urgent = [float(row["start_ms"]) for row in rows if not row["equal"]]
    equal = [float(row["start_ms"]) for row in rows if row["equal"]]
    if not urgent or not equal:
        raise DatabaseUnusable("the backlog was empty before enough probes were sent. Raise --jobs or --milliseconds")
    return Figures(
        jobs=jobs,
        probes=sent,
        seconds=seconds,
        start_p50_ms=percentile(urgent, 50),
        start_p99_ms=percentile(urgent, 99),
        start_max_ms=max(urgent),
        equal_p50_ms=percentile(equal, 50),
        equal_p99_ms=percentile(equal, 99),
        rss_mb=rss,
        daemons=1,
        slots=SLOTS,
    )


async def _send(database: BenchDatabase, db: asyncpg.Connection, probes: int, advance: Callable[[int], None]) -> int:
    """Send probes while the backlog lasts, and return their number."""
    statement = await db.prepare(INSERT_PROBE)
    equal_handlers = iter(PROBE_HANDLERS)
    urgent_lanes = iter(URGENT_LANES)
    for number in range(probes):
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311  no secret
        if not await database.fetch_value(BACKLOG_REMAINS, BACKLOG_HANDLER):
            return number
        if number % EQUAL_EVERY == EQUAL_EVERY - 1:
            handler, level, days_ago = next(equal_handlers), BACKLOG_PRIORITY, 1
        else:
            (handler, level), days_ago = next(urgent_lanes), 0
        await statement.fetch(handler, json.dumps({"sent": time.monotonic_ns()}), level, days_ago)
        advance(1)
    return probes
