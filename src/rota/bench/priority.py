"""How long an urgent job waits behind a backlog that fills every slot.

Each probe is the first job of its lane (queue, handler, priority), which is the hard case: only a sweep finds it. Urgent probes
have a smaller priority than the backlog. Equal probes have its priority, another handler, and the earliest run_at of all.
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
from rota.bench.priority_app import BACKLOG, PROBES
from rota.db.connecting import close_connection, open_connection
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from rota.bench.figures import Show
    from rota.bench.ground import Ground

SLOTS = 100
"""As in the default settings."""

BACKLOG_PRIORITY = 5
URGENT = [(handler, priority) for priority in range(BACKLOG_PRIORITY) for handler in PROBES]
EQUAL_EVERY = 5
"""One probe in so many is of the backlog's own priority."""

MAX_PROBES = EQUAL_EVERY * len(PROBES)
"""Each probe needs a lane of its own."""

PAUSE_SECONDS = (0.1, 0.3)
"""Between two probes, at random, so that they don't fall into step with the daemon's looks."""

STORE = """
insert into rota.jobs (handler, payload)
select $1, jsonb_build_object('milliseconds', $2::int4) from generate_series(1, $3::int4)
"""
AT_ONCE = 1000
SEND = "insert into rota.jobs (handler, payload, priority, run_at) values ($1, $2, $3, now() - $4 * interval '1 day')"
LEFT = "select exists (select from rota.jobs where handler = $1 and state = 'scheduled')"
FOUND = """
select handler, (result #>> '{}')::int8 / 1e6 as start_ms, scheduled_for < started_at - interval '12 hours' as equal
from rota.job_runs
where handler = any ($1)
"""


async def priority(ground: Ground, show: Show, *, jobs: int, probes: int, milliseconds: int) -> Figures:
    """Measure the start delay of single jobs that go first by the rules, behind `jobs` due jobs of so many milliseconds each."""
    async with daemons(ground, count=1, slots=SLOTS, app="rota.bench.priority_app:app") as running:
        await ground.ask("select rota.pause_queue($1, 'until the backlog is stored')", QUEUE)
        await ground.tidy()
        with show.step(f"{jobs:,} jobs stored", jobs) as tell:
            for done in range(0, jobs, AT_ONCE):
                count = min(AT_ONCE, jobs - done)
                await ground.db.execute(STORE, BACKLOG, milliseconds, count)
                tell(count)
        await ground.ask("select rota.resume_queue($1)", QUEUE)
        db = await open_connection(ground.dsn)
        began = time.perf_counter()
        try:
            with show.step("probes", probes) as tell:
                sent = await _send(ground, db, probes, tell)
            while len(rows := await ground.db.fetch(FOUND, PROBES)) < sent:
                running.check()
                await asyncio.sleep(0.1)
            seconds = time.perf_counter() - began
        finally:
            await close_connection(db)
        rss = running.rss_mb()
    urgent = [float(row["start_ms"]) for row in rows if not row["equal"]]
    equal = [float(row["start_ms"]) for row in rows if row["equal"]]
    if not urgent or not equal:
        raise DatabaseUnusable("the backlog was gone before it could be measured: raise --jobs or --milliseconds")
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


async def _send(ground: Ground, db: asyncpg.Connection, probes: int, tell: Callable[[int], None]) -> int:
    """Send probes while there is a backlog; return how many were sent."""
    statement = await db.prepare(SEND)
    equal = iter(PROBES)
    urgent = iter(URGENT)
    for number in range(probes):
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311  no secret
        if not await ground.ask(LEFT, BACKLOG):
            return number
        if number % EQUAL_EVERY == EQUAL_EVERY - 1:
            handler, level, days = next(equal), BACKLOG_PRIORITY, 1
        else:
            (handler, level), days = next(urgent), 0
        await statement.fetch(handler, json.dumps({"sent": time.monotonic_ns()}), level, days)
        tell(1)
    return probes
