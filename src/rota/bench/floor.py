"""The floor: run only a job's claim and settlement in a loop. This is the fastest that the schema allows on this server."""

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
from rota.domain.job import NodeId
from rota.lifecycle.lanes import ANY_TIME

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from rota.bench.ground import Ground

CONNECTIONS = 2
BATCH = 500
LEASE = timedelta(seconds=30)
PRIORITY = 5


async def measure_floor(ground: Ground, jobs: int, tell: Callable[[int], None]) -> float:
    """Insert `jobs` jobs, claim and settle them on two connections in batches of 500, and return jobs per second."""
    await queries.register_handlers(
        ground.db, app="bench", release=None, handlers=[(NOOP, None, None, None, None, None, None)]
    )
    await ground.tidy()
    await ground.insert(NOOP, jobs)
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            db = await open_connection(ground.dsn)
            stack.push_async_callback(db.close)
            await queries.raise_fence_tokens(db)
            connections.append(db)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for db in connections:
                group.create_task(_claim_and_settle(db, tell))
        return jobs / (time.perf_counter() - began)


async def _claim_and_settle(db: asyncpg.Connection, tell: Callable[[int], None]) -> None:
    node = NodeId(uuid.uuid4())
    start = ANY_TIME
    while True:
        # As in the daemon, the last claimed run_at bounds the search. A final search without the bound finds earlier jobs.
        claims, *_ = await queries.claim_due_jobs(
            db,
            node=node,
            rooms={QUEUE: BATCH},
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
            tell(len(claims))
        elif start == ANY_TIME:
            return
        else:
            start = ANY_TIME
