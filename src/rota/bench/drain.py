"""Measure how fast daemons empty a backlog of jobs that do nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rota.bench.daemons import NO_SETTINGS, daemons
from rota.bench.figures import Figures
from rota.bench.floor import measure_floor
from rota.bench.jobs import NOOP, QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rota.bench.daemons import Daemons
    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

POLL_SECONDS = 0.05
MAX_FLOOR_JOBS = 100_000

# Jobs are claimed almost in the order of job_id, so the highest ended job_id shows the progress. It costs only an index lookup.
MAX_ENDED_JOB_ID = "select coalesce(max(job_id), 0) from rota.job_runs"
COUNT_ENDED = "select count(*) from rota.job_runs where job_id > $1"
LAST_ENDED_AT = "select max(finished_at) from rota.job_runs where job_id > $1"


async def measure_drain(
    database: BenchDatabase, reporter: Reporter, *, jobs: int, count: int, slots: int, floor: bool
) -> Figures:
    """Drain `jobs` jobs with `count` daemons, and return the figures. With `floor`, also measure the floor before and after."""
    floors = []
    if floor:
        floors.append(await _measure_floor(database, reporter, "floor, before", jobs))
    figures = await drain_once(database, reporter, jobs=jobs, count=count, slots=slots)
    if floor:
        floors.append(await _measure_floor(database, reporter, "floor, after", jobs))
    if floors and figures.jobs_per_second is not None:
        mean = sum(floors) / len(floors)
        figures = replace(figures, floor_per_second=mean, ratio_to_floor=figures.jobs_per_second / mean)
    return figures


async def _measure_floor(database: BenchDatabase, reporter: Reporter, title: str, jobs: int) -> float:
    jobs = min(jobs, MAX_FLOOR_JOBS)
    with reporter.progress(title, jobs) as advance:
        return await measure_floor(database, jobs, advance)


async def drain_once(
    database: BenchDatabase,
    reporter: Reporter,
    *,
    jobs: int,
    count: int,
    slots: int,
    settings: Mapping[str, str] = NO_SETTINGS,
) -> Figures:
    """Drain `jobs` jobs with `count` daemons. `settings`: more environment variables of the daemons."""
    await database.fetch_value("select rota.pause_queue($1, 'until the backlog is stored')", QUEUE)
    last_earlier_job = int(str(await database.fetch_value(MAX_ENDED_JOB_ID)))
    async with daemons(database, count=count, slots=slots, settings=settings) as running:
        await database.vacuum()
        await database.insert_jobs(NOOP, jobs)
        before = await database.read_counters(wait_for_flush=True)
        cpu_before, server_before = running.cpu_seconds(), await database.server_cpu_seconds()
        await database.fetch_value("select rota.resume_queue($1)", QUEUE)
        resumed: Any = await database.fetch_value("select clock_timestamp()")
        with reporter.progress(f"{jobs:,} jobs, {count} daemon{'s' if count > 1 else ''}", jobs) as advance:
            rss_quarter = await wait_until_ended(database, running, last_earlier_job, jobs, advance)
        cpu_seconds = running.cpu_seconds() - cpu_before
        server_seconds = await database.server_cpu_seconds() - server_before
        rss = running.rss_mb()
        own_statements = database.own_statements
        after = await database.read_counters(wait_for_flush=False)
        last: Any = await database.connection.fetchval(LAST_ENDED_AT, last_earlier_job)
        flushed = await database.read_counters(wait_for_flush=True)
        dead = await database.count_dead_tuples()
    commits = (flushed.commits - before.commits - own_statements) / jobs
    statements = commits if after.statements is None else (after.sent_since(before) - own_statements) / jobs
    seconds = (last - resumed).total_seconds()
    return Figures(
        jobs=jobs,
        seconds=seconds,
        jobs_per_second=jobs / seconds,
        cpu_us_per_job=cpu_seconds / jobs * 1e6 or None,
        server_cpu_us_per_job=server_seconds / jobs * 1e6 or None,
        statements_per_job=statements,
        commits_per_job=commits,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / jobs,
        dead_tuples=dead,
        rss_mb=rss,
        rss_quarter_mb=rss_quarter,
        daemons=count,
        slots=slots,
    )


async def wait_until_ended(
    database: BenchDatabase, running: Daemons, last_earlier_job: int, jobs: int, advance: Callable[[int], None]
) -> float:
    """Wait until the jobs after `last_earlier_job` are in the ledger. Return the largest daemon's MB after a quarter of them."""
    rss_quarter, shown = 0.0, 0
    while True:
        running.check_running()
        ended = min(jobs, max(0, int(str(await database.fetch_value(MAX_ENDED_JOB_ID))) - last_earlier_job))
        advance(ended - shown)
        shown = ended
        if not rss_quarter and ended >= jobs / 4:
            rss_quarter = running.rss_mb()
        if ended >= jobs and int(str(await database.fetch_value(COUNT_ENDED, last_earlier_job))) >= jobs:
            return rss_quarter
        await asyncio.sleep(POLL_SECONDS)
