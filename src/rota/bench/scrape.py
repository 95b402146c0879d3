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
from rota.services.gauges import COUNTED, EXPLORED

if TYPE_CHECKING:
    from rota.bench.daemons import Daemons
    from rota.bench.figures import Show
    from rota.bench.ground import Ground

SCRAPES = 200
SAMPLES = 5
SAMPLE_SECONDS = 30.0

PLANT = """
insert into rota.jobs (handler, queue, priority, run_at)
select 'handler.' || n % $2, 'queue.' || n % $2, n % 10, now() + case when n % 3 = 0 then interval '1 day' else interval '0' end
from generate_series($1::int4, $3::int4) as n
"""
AT_ONCE = 10_000


async def scrape(ground: Ground, show: Show, *, jobs: int, names: int) -> Figures:
    """Store jobs of `names` handlers in as many queues, and scrape a daemon that has none of them."""
    with show.step("jobs stored", jobs) as tell:
        for first in range(1, jobs + 1, AT_ONCE):
            last = min(first + AT_ONCE - 1, jobs)
            await ground.db.execute(PLANT, first, names, last)
            tell(last - first + 1)
    await ground.tidy()
    sampled = [await _sample(ground) for _ in range(SAMPLES)]
    port = _free_port()
    async with (
        daemons(ground, count=1, slots=100, port=port) as running,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        await _shown(session, running, jobs)
        took, page = [], b""
        with show.step("scrapes", SCRAPES) as tell:
            began = time.perf_counter()
            for _ in range(SCRAPES):
                asked = time.perf_counter()
                async with session.get("/metrics") as answer:
                    page = await answer.read()
                took.append((time.perf_counter() - asked) * 1e3)
                tell(1)
            seconds = time.perf_counter() - began
        running.check()
        rss = running.rss_mb()
    return Figures(
        jobs=jobs,
        seconds=seconds,
        scrape_p50_ms=percentile(took, 50),
        scrape_p99_ms=percentile(took, 99),
        scrape_series=len(_series(page)),
        scrape_bytes=len(page),
        sample_ms=percentile(sampled, 50),
        rss_mb=rss,
        daemons=1,
        slots=100,
    )


async def _sample(ground: Ground) -> float:
    began = time.perf_counter()
    await reports.summarise_live_jobs(ground.db, counted=COUNTED, explored=EXPLORED)
    await queries.sample_backlog(ground.db)
    return (time.perf_counter() - began) * 1e3


async def _shown(session: aiohttp.ClientSession, running: Daemons, jobs: int) -> None:
    """Wait until a scrape shows that many jobs: a daemon shows none before its first sample."""
    until = time.monotonic() + SAMPLE_SECONDS
    while time.monotonic() < until:
        running.check()
        series: list[bytes] = []
        with suppress(aiohttp.ClientConnectionError):  # a daemon registers before its port is open
            async with session.get("/metrics") as answer:
                series = _series(await answer.read())
        if sum(float(line.split()[-1]) for line in series if line.startswith(b"rota_jobs{")) >= jobs:
            return
        await asyncio.sleep(0.05)
    raise DatabaseUnusable(f"the daemon doesn't show {jobs:,} jobs after {SAMPLE_SECONDS:g} s")


def _series(page: bytes) -> list[bytes]:
    return [line for line in page.splitlines() if line and not line.startswith(b"#")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
