"""Handlers in threads and processes that commit transactions through a pooler."""

from __future__ import annotations

from typing import Any

import rota

app = rota.App("pooled")


@app.handler("thread", max_attempts=1)
def thread(job: rota.SyncJob[Any]) -> None:
    """Run one statement so often that the driver would prepare it."""
    with job.transaction() as conn:
        for number in range(8):
            conn.execute("select %s::int", (number,))


@app.handler("process", runs_in="process", max_attempts=1)
async def process(job: rota.Job[Any]) -> None:
    """Run statements that the driver would prepare."""
    async with job.transaction() as conn:
        for number in range(8):
            await conn.fetchval(f"select $1::int + {number}", number)
