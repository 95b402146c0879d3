"""Measure how fast daemons empty a backlog of jobs that do nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rota.bench.daemons import daemons
from rota.bench.figures import Figures
from rota.bench.floor import measure_floor
from rota.bench.jobs import NOOP, QUEUE

if TYPE_CHECKING:
    from datetime import datetime

    from rota.bench.daemons import Daemons
    from rota.bench.figures import Show
    from rota.bench.ground import Ground

POLL = 0.05
LARGEST_FLOOR = 100_000

# Jobs are claimed almost in job_id order, so the highest ended job_id is the progress. The index alone answers this.
HOW_FAR = "select coalesce(max(job_id), 0) from rota.job_runs"
ENDED = "select count(*) from rota.job_runs where job_id > $1"
LAST_ENDED = "select max(finished_at) from rota.job_runs where job_id > $1"


async def drain(ground: Ground, show: Show, *, jobs: int, count: int, slots: int, floor: bool) -> Figures:
    """Drain `jobs` jobs with `count` daemons and return the figures. `floor`: measure the floor before and after, too."""
    floors = []
    if floor:
        with show.step("floor, before", min(jobs, LARGEST_FLOOR)) as tell:
            floors.append(await measure_floor(ground, min(jobs, LARGEST_FLOOR), tell))
    figures = await _drain(ground, show, jobs=jobs, count=count, slots=slots)
    if floor:
        with show.step("floor, after", min(jobs, LARGEST_FLOOR)) as tell:
            floors.append(await measure_floor(ground, min(jobs, LARGEST_FLOOR), tell))
    if floors and figures.jobs_per_second is not None:
        mean = sum(floors) / len(floors)
        figures = replace(figures, floor_per_second=mean, ratio_to_floor=figures.jobs_per_second / mean)
    return figures


async def _drain(ground: Ground, show: Show, *, jobs: int, count: int, slots: int) -> Figures:
    await ground.ask("select rota.pause_queue($1, 'until the backlog is stored')", QUEUE)
    first = int(str(await ground.ask(HOW_FAR)))
    async with daemons(ground, count=count, slots=slots) as running:
        await ground.tidy()
        await ground.insert(NOOP, jobs)
        before = await ground.counters(settled=True)
        used = running.cpu_seconds()
        await ground.ask("select rota.resume_queue($1)", QUEUE)
        resumed: Any = await ground.ask("select clock_timestamp()")
        with show.step(f"{jobs:,} jobs, {count} daemon{'s' if count > 1 else ''}", jobs) as tell:
            rss_quarter = await until_ended(ground, running, first, jobs, tell)
        used = running.cpu_seconds() - used
        rss = running.rss_mb()
        ours = ground.asked
        after = await ground.counters(settled=False)
        last: Any = await ground.db.fetchval(LAST_ENDED, first)
        flushed = await ground.counters(settled=True)
        dead = await ground.dead_tuples()
    commits = (flushed.commits - before.commits - ours) / jobs
    statements = commits if after.statements is None else (after.sent_since(before) - ours) / jobs
    seconds = _seconds(resumed, last)
    return Figures(
        jobs=jobs,
        seconds=seconds,
        jobs_per_second=jobs / seconds,
        cpu_us_per_job=used / jobs * 1e6 or None,
        statements_per_job=statements,
        commits_per_job=commits,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / jobs,
        dead_tuples=dead,
        rss_mb=rss,
        rss_quarter_mb=rss_quarter,
        daemons=count,
        slots=slots,
    )


async def until_ended(ground: Ground, running: Daemons, first: int, jobs: int, tell: Any) -> float:
    """Wait until all jobs are in the ledger. Return the daemons' memory in MB after a quarter of the jobs."""
    rss_quarter, shown = 0.0, 0
    while True:
        running.check()
        ended = min(jobs, max(0, int(str(await ground.ask(HOW_FAR))) - first))
        tell(ended - shown)
        shown = ended
        if not rss_quarter and ended >= jobs / 4:
            rss_quarter = running.rss_mb()
        if ended >= jobs and int(str(await ground.ask(ENDED, first))) >= jobs:
            return rss_quarter
        await asyncio.sleep(POLL)


def _seconds(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds()
