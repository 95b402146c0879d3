"""Measure a scrape of /metrics while many jobs have unknown handlers and queues, which any client may insert."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp

from rota.bench.daemons import daemons
from rota.bench.figures import Figures
from rota.bench.latency import percentile
from rota.db import queries, reports
from rota.errors import DatabaseUnusable
from rota.services.gauges import MAX_COUNTED_JOBS, MAX_SEARCHED_LANES

if TYPE_CHECKING:
    from rota.bench.daemons import Daemons
    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

SCRAPES = 200
SAMPLES = 5
FIRST_SAMPLE_SECONDS = 30.0

INSERT_JOBS = """
insert into rota.jobs (handler, queue, priority, run_at)
select 'handler.' || n % $2, 'queue.' || n % $2, n % 10, now() + case when n % 3 = 0 then interval '1 day' else interval '0' end
from generate_series($1::int4, $3::int4) as n
"""
JOBS_PER_INSERT = 10_000


async def measure_scrape(database: BenchDatabase, reporter: Reporter, *, jobs: int, names: int) -> Figures:
    """Store jobs of `names` handlers in as many queues, and scrape a daemon that has none of these handlers."""
    with reporter.progress("jobs stored", jobs) as advance:
        for first in range(1, jobs + 1, JOBS_PER_INSERT):
            last = min(first + JOBS_PER_INSERT - 1, jobs)
            await database.connection.execute(INSERT_JOBS, first, names, last)
            advance(last - first + 1)
    await database.vacuum()
    sample_ms = [await _sample(database) for _ in range(SAMPLES)]
    port = _free_port()
    async with (
        daemons(database, count=1, slots=100, port=port) as running,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        await _wait_for_first_sample(session, running, jobs)
        scrape_ms, page = [], b""
        with reporter.progress("scrapes", SCRAPES) as advance:
            started_at = time.perf_counter()
            for _ in range(SCRAPES):
                sent_at = time.perf_counter()
                async with session.get("/metrics") as response:
                    page = await response.read()
                scrape_ms.append((time.perf_counter() - sent_at) * 1e3)
                advance(1)
            seconds = time.perf_counter() - started_at
        running.check_running()
        rss = running.rss_mb()
    return Figures(
        jobs=jobs,
        seconds=seconds,
        scrape_p50_ms=percentile(scrape_ms, 50),
        scrape_p99_ms=percentile(scrape_ms, 99),
        scrape_series=len(_series(page)),
        scrape_bytes=len(page),
        sample_ms=percentile(sample_ms, 50),
        rss_mb=rss,
        daemons=1,
        slots=100,
    )


async def _sample(database: BenchDatabase) -> float:
    """Run the queries for the gauges. Return the milliseconds that they took."""
    started_at = time.perf_counter()
    await reports.summarise_live_jobs(database.connection, counted=MAX_COUNTED_JOBS, explored=MAX_SEARCHED_LANES)
    await queries.sample_backlog(database.connection)
    return (time.perf_counter() - started_at) * 1e3


async def _wait_for_first_sample(session: aiohttp.ClientSession, running: Daemons, jobs: int) -> None:
    """Wait until a scrape shows the jobs. Before its first sample, a daemon shows none."""
    deadline = time.monotonic() + FIRST_SAMPLE_SECONDS
    while time.monotonic() < deadline:
        running.check_running()
        series: list[bytes] = []
        with suppress(aiohttp.ClientConnectionError):  # a daemon registers before its port is open
            async with session.get("/metrics") as response:
                series = _series(await response.read())
        if sum(float(line.split()[-1]) for line in series if line.startswith(b"rota_jobs{")) >= jobs:
            return
        await asyncio.sleep(0.05)
    raise DatabaseUnusable(f"the daemon's metrics do not show {jobs:,} jobs after {FIRST_SAMPLE_SECONDS:g} s")


def _series(page: bytes) -> list[bytes]:
    return [line for line in page.splitlines() if line and not line.startswith(b"#")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
