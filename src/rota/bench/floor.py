"""Measure the floor: claims and settlements in a loop, without a daemon. The schema allows no higher rate on this server."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

from rota.bench.jobs import NOOP, QUEUE
from rota.db import queries
from rota.db.connecting import open_connection
from rota.db.queries import ANY_TIME
from rota.domain.job import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from rota.bench.database import BenchDatabase

CONNECTIONS = 2
BATCH = 500
LEASE = timedelta(seconds=30)
PRIORITY = 5


async def measure_floor(database: BenchDatabase, jobs: int, advance: Callable[[int], None]) -> float:
    """Insert `jobs` jobs, claim and settle them on CONNECTIONS connections in batches of BATCH, and return jobs per second."""
    await queries.register_handlers(
        database.connection, app="bench", release=None, handlers=[(NOOP, None, None, None, None, None, None)]
    )
    await database.vacuum()
    await database.insert_jobs(NOOP, jobs)
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            db = await open_connection(database.dsn)
            stack.push_async_callback(db.close)
            await queries.raise_fence_tokens(db)
            connections.append(db)
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for db in connections:
                group.create_task(_claim_and_settle(db, advance))
        return jobs / (time.perf_counter() - started_at)


async def _claim_and_settle(db: asyncpg.Connection, advance: Callable[[int], None]) -> None:
    node = NodeId(uuid.uuid4())
    start = ANY_TIME
    while True:
        # As in the daemon, a search starts at the last claimed run_at. The last one starts at ANY_TIME, to find skipped jobs.
        claims, *_ = await queries.claim_due_jobs(
            db,
            node=node,
            groups={QUEUE: BATCH},
            lanes=[(QUEUE, QUEUE, NOOP, PRIORITY, start)],
            suspects=0,
            total=BATCH,
            lease=LEASE,
        )
        if claims:
            await queries.settle_succeeded(
                db, node=node, attempts=[(claim.job_id, claim.fence_token) for claim in claims], results=[]
            )
            start = max(claim.run_at for claim in claims)
            advance(len(claims))
        elif start == ANY_TIME:
            return
        else:
            start = ANY_TIME
