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

    from rota.bench.figures import Show
    from rota.bench.ground import Ground

ROUNDS = 7
"""Rounds of each, alternating, so that both run under the same load."""


async def measure_enqueue(ground: Ground, show: Show, *, jobs: int) -> Figures:
    """Insert `jobs` jobs both ways in `ROUNDS` rounds, each in one transaction, and compare the medians."""
    payloads = [{"order": n, "mail": f"customer{n}@example.org", "lines": [1, 2, 3]} for n in range(jobs)]
    rows = [(NOOP, json.dumps(payload)) for payload in payloads]

    async def copy() -> None:
        await ground.db.copy_records_to_table("jobs", schema_name="rota", columns=["handler", "payload"], records=rows)

    async def enqueue() -> None:
        await client.enqueue_many(ground.db, NOOP, payloads)

    copied, enqueued = [], []
    with show.step("inserted", jobs * ROUNDS * 2) as tell:
        for _ in range(ROUNDS):
            copied.append(await _time(ground, copy))
            tell(jobs)
            enqueued.append(await _time(ground, enqueue))
            tell(jobs)
    took = median(enqueued)
    return Figures(
        jobs=jobs,
        seconds=took,
        enqueued_per_second=jobs / took,
        copied_per_second=jobs / median(copied),
        ratio_to_copy=median(copied) / took,
    )


async def _time(ground: Ground, work: Callable[[], Awaitable[None]]) -> float:
    await ground.db.execute("truncate rota.jobs")
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began
