"""Measure how the cost of a job grows with what is stored, and with the numbers of handlers, queues and idle daemons.

Each curve changes one number and leaves the others at 1 or 0. Each point is measured several times, and the median printed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

from rota.bench.daemons import daemons
from rota.bench.figures import Comparison
from rota.bench.growth_app import HANDLERS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from rota.bench.daemons import Daemons
    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

Curve: TypeAlias = Literal["future jobs", "due backlog", "ledger rows", "handlers", "queues", "idle daemons"]

SLOTS = 100
"""The default."""

ROUNDS = 3
POLL_SECONDS = 0.2
"""Each poll costs the server some processor time: that is part of the figures."""

ROWS_PER_STATEMENT = 100_000

INSERT_JOBS = """
insert into rota.jobs (handler, queue, run_at)
select 'bench.growth.' || n % $1::int4, 'bench.' || n % $2::int4, now() + $3::text::interval
from generate_series(1, $4::int4) as n
"""
INSERT_LEDGER = """
insert into rota.job_runs (job_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue)
select nextval('rota.jobs_job_id_seq'), at, 0, at, at, 1, 'succeeded', 'bench.growth.0', 'bench.0'
from generate_series(1, $1::int4) as n,
    lateral (select greatest(now() - n * interval '1 ms', date_trunc('day', now(), 'UTC')) as at) as finished
"""
COUNT_DUE = "select count(*) from rota.jobs where run_at <= now()"
COUNT_RUNNING = "select count(*) from rota.jobs where state = 'running'"
LAST_JOB_ID = "select last_value from rota.jobs_job_id_seq"
COUNT_ENDED = "select count(*) from rota.job_runs where job_id > $1"
NOTES = (
    "daemon_us, server_us: processor time per job in microseconds (the medians), of all daemons and of the whole server",
    "wal_bytes, buffers: write-ahead log and buffer accesses per job",
    "cost: daemon_us + server_us, compared with the curve's first row",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting to measure."""

    curve: Curve
    size: int

    def of(self, curve: Curve, otherwise: int) -> int:
        """Return the size if this point belongs to the curve."""
        return self.size if self.curve == curve else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one round, per job. Times are in microseconds."""

    daemon_us: float
    server_us: float
    wal_bytes: float
    buffers: float


async def measure_growth(
    database: BenchDatabase, reporter: Reporter, *, jobs: int, curves: Sequence[tuple[Curve, Sequence[int]]]
) -> Comparison:
    """Measure `jobs` jobs per round at each size of each curve."""
    rows: list[dict[str, str | float | int | None]] = []
    with reporter.progress("points measured", sum(len(sizes) for _, sizes in curves)) as advance:
        for curve, sizes in curves:
            first = 0.0
            for size in sizes:
                costs = await _measure_point(database, Point(curve=curve, size=size), jobs)
                daemon_us, server_us = median(c.daemon_us for c in costs), median(c.server_us for c in costs)
                first = first or daemon_us + server_us
                rows.append(
                    {
                        "curve": curve,
                        "size": size,
                        "daemon_us": daemon_us or None,
                        "server_us": server_us or None,
                        "cost": (daemon_us + server_us) / first if first else None,
                        "wal_bytes": median(c.wal_bytes for c in costs),
                        "buffers": median(c.buffers for c in costs),
                    }
                )
                advance(1)
    return Comparison(title=f"{jobs:,} jobs per round, {ROUNDS} rounds, {SLOTS} slots", rows=rows, notes=NOTES)


async def _measure_point(database: BenchDatabase, point: Point, jobs: int) -> list[Cost]:
    handlers, queues = point.of("handlers", 1), point.of("queues", 1)
    await _store(database, point)
    last_stored = int(await database.connection.fetchval(LAST_JOB_ID))
    idle = point.of("idle daemons", 0)
    async with (
        _daemons(database, handlers=handlers, count=1, queues="*") as busy,
        _daemons(database, handlers=1, count=idle, queues="idle") as waiting,
    ):
        costs = []
        for _ in range(ROUNDS):
            await database.fetch_value("select rota.pause_queue('*', 'until the jobs are stored')")
            stored = int(await database.connection.fetchval(COUNT_DUE))
            missing = max(jobs, point.of("due backlog", 0)) - stored
            await _insert_jobs(database, missing, handlers=handlers, queues=queues)
            costs.append(await _measure_round(database, (busy, waiting), jobs, last_stored))
        return costs


def _daemons(
    database: BenchDatabase, *, handlers: int, count: int, queues: str
) -> AbstractAsyncContextManager[Daemons]:
    settings = {HANDLERS_VARIABLE: str(handlers), "ROTA_QUEUES": f"{queues}:{SLOTS}"}
    return daemons(database, count=count, slots=SLOTS, app="rota.bench.growth_app:app", settings=settings)


async def _store(database: BenchDatabase, point: Point) -> None:
    """Delete all jobs and the ledger, and store what this point has of them."""
    await database.connection.execute("truncate rota.jobs, rota.job_runs")
    await _insert_jobs(database, point.of("future jobs", 0), after="1 year")
    ledger = point.of("ledger rows", 0)
    for stored in range(0, ledger, ROWS_PER_STATEMENT):
        await database.connection.execute(INSERT_LEDGER, min(ROWS_PER_STATEMENT, ledger - stored))
    await database.vacuum()


async def _insert_jobs(
    database: BenchDatabase, count: int, *, handlers: int = 1, queues: int = 1, after: str = "0"
) -> None:
    for stored in range(0, count, ROWS_PER_STATEMENT):
        part = min(ROWS_PER_STATEMENT, count - stored)
        await database.connection.execute(INSERT_JOBS, handlers, queues, after, part)


async def _measure_round(database: BenchDatabase, running: Sequence[Daemons], jobs: int, last_stored: int) -> Cost:
    """Run at least `jobs` jobs, and return the cost of those that have ended. Further jobs of the backlog stay stored."""
    ended_before = int(str(await database.fetch_value(COUNT_ENDED, last_stored)))
    before = await database.read_counters(wait_for_flush=True)
    cpu_before = sum(group.cpu_seconds() for group in running)
    server_before = await database.server_cpu_seconds()
    await database.fetch_value("select rota.resume_queue('*')")
    while int(str(await database.fetch_value(COUNT_ENDED, last_stored))) - ended_before < jobs:
        for group in running:
            group.check_running()
        await asyncio.sleep(POLL_SECONDS)
    await database.fetch_value("select rota.pause_queue('*', 'the round is over')")
    while await database.fetch_value(COUNT_RUNNING):  # noqa: ASYNC110  other processes change it
        await asyncio.sleep(POLL_SECONDS)
    cpu = sum(group.cpu_seconds() for group in running) - cpu_before
    server = await database.server_cpu_seconds() - server_before
    ended = int(str(await database.fetch_value(COUNT_ENDED, last_stored))) - ended_before
    after = await database.read_counters(wait_for_flush=True)
    return Cost(
        daemon_us=cpu / ended * 1e6,
        server_us=server / ended * 1e6,
        wal_bytes=(after.wal_bytes - before.wal_bytes) / ended,
        buffers=(after.buffers - before.buffers) / ended,
    )
