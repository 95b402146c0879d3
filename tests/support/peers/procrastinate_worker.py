"""Procrastinate on psycopg."""

from __future__ import annotations

import asyncio

import asyncpg
import procrastinate

from common import BATCH, IS_BEST, JOBS, Jobs, analyze

app = procrastinate.App(connector=procrastinate.PsycopgConnector(min_size=4, max_size=20))


async def main() -> None:
    jobs = Jobs()

    @app.task(queue="q")
    async def f() -> None:
        jobs.count()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for _ in range(0, JOBS, BATCH):
            await f.batch_defer_async(*[{} for _ in range(BATCH)])
        db = await asyncpg.connect()
        await analyze()
        jobs.start()
        settings = {"concurrency": 100} if IS_BEST else {}
        task = asyncio.create_task(app.run_worker_async(queues=["q"], install_signal_handlers=False, **settings))
        await jobs.wait_and_report(
            "procrastinate",
            "concurrency 100" if IS_BEST else "concurrency 1",
            lambda: db.fetchval("select count(*) from procrastinate_jobs where status in ('todo', 'doing')"),
        )
        await task


asyncio.run(main())
