"""Measure how fast daemons fire many schedules that are due at one instant, and run their jobs."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

from rota.bench.daemons import daemons
from rota.bench.drain import wait_until_ended
from rota.bench.figures import Figures
from rota.bench.jobs import NOOP
from rota.bench.schedules import store_schedules
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from datetime import datetime

    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

ONE_DAY = timedelta(days=1)

MIN_LEAD = timedelta(seconds=2)
"""The shortest time from the end of the preparation to the instant."""

# As in practice, the due schedules are spread over the whole table.
MAKE_DUE = """
update rota.schedule_clocks set next_fire_at = now() + $2::interval where schedule_id % $1 = 0
returning next_fire_at
"""
COUNT_FIRED = "select count(*) from rota.fires where disposition = 'enqueued'"
LAST_TIMES = """
select max(finished_at) as last_finished_at, (select max(decided_at) from rota.fires) as last_decided_at from rota.job_runs
"""
LATENESS = """
select percentile_disc(array[0.5, 0.99]) within group (order by decided_at - scheduled_for) from rota.fires
"""
START_DELAY = """
select percentile_disc(array[0.5, 0.99, 1.0]) within group (order by started_at - scheduled_for) from rota.job_runs
"""


async def measure_spike(
    database: BenchDatabase, reporter: Reporter, *, schedules: int, due: int, count: int, slots: int
) -> Figures:
    """Make `due` of `schedules` stored schedules due at one instant, and measure until all their jobs are done."""
    with reporter.progress("schedules stored", schedules) as advance:
        await store_schedules(database, advance, first=1, last=schedules, handler=NOOP)
    async with daemons(database, count=count, slots=slots) as running:
        instant, due = await _make_due(database, schedules // due)
        before = await database.read_counters(wait_for_flush=False)
        cpu_before, server_before = running.cpu_seconds(), await database.server_cpu_seconds()
        with reporter.progress(f"{due:,} fires, {count} daemon{'s' if count > 1 else ''}", due) as advance:
            await wait_until_ended(database, running, 0, due, advance)
        cpu_seconds = running.cpu_seconds() - cpu_before
        server_seconds = await database.server_cpu_seconds() - server_before
        rss = running.rss_mb()
        own_statements = database.own_statements
        after = await database.read_counters(wait_for_flush=False)
        flushed = await database.read_counters(wait_for_flush=True)
        last: Any = await database.connection.fetchrow(LAST_TIMES)
        fired = int(await database.connection.fetchval(COUNT_FIRED))
        lateness: Any = await database.connection.fetchval(LATENESS)
        start_delay: Any = await database.connection.fetchval(START_DELAY)
        dead = await database.count_dead_tuples()
    assert fired == due, f"{due} were due, {fired} fired"  # noqa: S101  otherwise the figures are worthless
    seconds = (last["last_finished_at"] - instant).total_seconds()
    commits = (flushed.commits - before.commits - own_statements) / due
    statements = commits if after.statements is None else (after.sent_since(before) - own_statements) / due
    return Figures(
        schedules=schedules,
        jobs=due,
        seconds=seconds,
        jobs_per_second=due / seconds,
        fires_per_second=due / (last["last_decided_at"] - instant).total_seconds(),
        lateness_p50_ms=_ms(lateness[0]),
        lateness_p99_ms=_ms(lateness[1]),
        start_p50_ms=_ms(start_delay[0]),
        start_p99_ms=_ms(start_delay[1]),
        start_max_ms=_ms(start_delay[2]),
        cpu_us_per_job=cpu_seconds / due * 1e6 or None,
        server_cpu_us_per_job=server_seconds / due * 1e6 or None,
        statements_per_job=statements,
        commits_per_job=commits,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / due,
        dead_tuples=dead,
        rss_mb=rss,
        daemons=count,
        slots=slots,
    )


async def _make_due(database: BenchDatabase, nth: int) -> tuple[datetime, int]:
    """Make every nth schedule due soon, then write a checkpoint. Return the instant and the number of due schedules."""
    started_at = time.monotonic()
    # Prepare twice. The first run measures how long it takes, so that the instant does not pass during the second run.
    await _prepare(database, nth, ONE_DAY)
    preparation = timedelta(seconds=time.monotonic() - started_at)
    instant, due = await _prepare(database, nth, preparation * 2 + MIN_LEAD)
    now: datetime = await database.connection.fetchval("select clock_timestamp()")
    if now >= instant:
        raise DatabaseUnusable("the preparation took too long, and the instant of the spike has passed. Try again")
    return instant, due


async def _prepare(database: BenchDatabase, nth: int, lead: timedelta) -> tuple[datetime, int]:
    rows = await database.connection.fetch(MAKE_DUE, nth, lead)
    await database.connection.execute("vacuum (analyze) rota.schedule_clocks")
    # Without a checkpoint, fewer full pages are logged, and wal_bytes_per_job is smaller. The login may not be allowed to run one.
    with suppress(asyncpg.InsufficientPrivilegeError):
        await database.connection.execute("checkpoint")
    return rows[0]["next_fire_at"], len(rows)


def _ms(interval: timedelta) -> float:
    return interval.total_seconds() * 1e3
