"""Oban for Python, on psycopg and uvloop."""

from __future__ import annotations

import asyncpg
import uvloop
from oban import Oban, schema, worker
from psycopg_pool import AsyncConnectionPool

from common import BATCH, IS_BEST, JOBS, Jobs, analyze

LIMIT = 100 if IS_BEST else 10
"""There is no default: 10 is what the documentation's first example uses."""

jobs: Jobs


@worker(queue="q")
class Work:
    """A job that does nothing."""

    async def process(self, _job: object) -> None:
        """Count the job."""
        jobs.count()


async def main() -> None:
    global jobs  # noqa: PLW0603  the worker class finds it there
    pool = AsyncConnectionPool("", min_size=4, max_size=20, open=False)
    await pool.open()
    await schema.install(pool)
    async with Oban(pool=pool, queues={}) as oban:
        for _ in range(0, JOBS, BATCH):
            await oban.enqueue_many(*[Work.new({}) for _ in range(BATCH)])
    db = await asyncpg.connect()
    jobs = Jobs()
    async with Oban(pool=pool, queues={"q": LIMIT}):
        await analyze()
        jobs.start()
        await jobs.wait_and_report(
            "oban",
            f"queue limit {LIMIT}",
            lambda: db.fetchval("select count(*) from oban_jobs where state in ('available', 'executing')"),
        )


uvloop.run(main())
