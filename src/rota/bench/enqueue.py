"""Compare `rota.enqueue_many` with a bare COPY of prepared rows."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import TYPE_CHECKING

from rota import client
from rota.bench.figures import Figures
from rota.bench.jobs import NOOP

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

ROUNDS = 7
"""Rounds of each method. They alternate, so that other load on the machine affects both alike."""


async def measure_enqueue(database: BenchDatabase, reporter: Reporter, *, jobs: int) -> Figures:
    """Insert `jobs` jobs in one transaction, by either method in turns, and compare the median times."""
    payloads = [{"order": n, "mail": f"customer{n}@example.org", "lines": [1, 2, 3]} for n in range(jobs)]
    rows = [(NOOP, json.dumps(payload)) for payload in payloads]

    async def copy() -> None:
        await database.connection.copy_records_to_table(
            "jobs", schema_name="rota", columns=["handler", "payload"], records=rows
        )

    async def enqueue() -> None:
        await client.enqueue_many(database.connection, NOOP, payloads)

    copy_seconds, enqueue_seconds = [], []
    with reporter.progress("inserted", jobs * ROUNDS * 2) as advance:
        for _ in range(ROUNDS):
            copy_seconds.append(await _time(database, copy))
            advance(jobs)
            enqueue_seconds.append(await _time(database, enqueue))
            advance(jobs)
    seconds = median(enqueue_seconds)
    return Figures(
        jobs=jobs,
        seconds=seconds,
        enqueued_per_second=jobs / seconds,
        copied_per_second=jobs / median(copy_seconds),
        ratio_to_copy=median(copy_seconds) / seconds,
    )


async def _time(database: BenchDatabase, work: Callable[[], Awaitable[None]]) -> float:
    await database.connection.execute("truncate rota.jobs")
    started_at = time.perf_counter()
    await work()
    return time.perf_counter() - started_at
