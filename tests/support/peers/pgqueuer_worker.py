"""PgQueuer on asyncpg and uvloop."""

from __future__ import annotations

import asyncio

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job  # noqa: TC002  the library reads the annotation
from pgqueuer.queries import Queries

from common import BATCH, IS_BEST, JOBS, Jobs, analyze


async def main() -> None:
    pool = await asyncpg.create_pool(min_size=4, max_size=10)
    driver = AsyncpgPoolDriver(pool)
    queries = Queries(driver)
    await queries.install()
    for _ in range(0, JOBS, BATCH):
        await queries.enqueue(["f"] * BATCH, [b"{}"] * BATCH, [0] * BATCH)
    jobs = Jobs()
    worker = PgQueuer(driver)

    @worker.entrypoint("f")
    async def f(_job: Job) -> None:
        jobs.count()

    await analyze()
    jobs.start()
    settings = {"batch_size": 100, "max_concurrent_tasks": 200} if IS_BEST else {}
    task = asyncio.create_task(worker.run(**settings))
    await jobs.wait_and_report(
        "pgqueuer",
        "batch_size 100, max_concurrent_tasks 200" if IS_BEST else "batch_size 10",
        lambda: pool.fetchval("select count(*) from pgqueuer"),
    )
    await task


uvloop.run(main())
