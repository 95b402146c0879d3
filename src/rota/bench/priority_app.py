"""The app that the daemon of `rota bench priority` runs: one handler for the backlog, many for the probes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rota.app import App
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time

BACKLOG_HANDLER = "bench.backlog"
PROBE_HANDLERS = [f"bench.probe.{number}" for number in range(40)]

app = App("bench")


@app.handler(BACKLOG_HANDLER)
async def backlog(job: Job[Any]) -> None:
    """Sleep for the payload's number of milliseconds."""
    if milliseconds := job.payload.get("milliseconds"):
        await asyncio.sleep(milliseconds / 1000)


async def probe(job: Job[Any]) -> int:
    """Return how many nanoseconds ago the job was sent. All processes of a machine share the monotonic clock."""
    return time.monotonic_ns() - int(job.payload["sent"])


for name in PROBE_HANDLERS:
    app.handler(name)(probe)
