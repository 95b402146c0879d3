"""The app that the bench's daemons run."""

from __future__ import annotations

import time
from typing import Any

from rota.app import App
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time

NOOP = "bench.noop"
ARRIVE = "bench.arrive"
QUEUE = "default"

app = App("bench")


@app.handler(NOOP)
async def noop(job: Job[Any]) -> None:
    """Do nothing, so that only rota's own cost is measured."""


@app.handler(ARRIVE)
async def arrive(job: Job[Any]) -> int:
    """Return how many nanoseconds ago the job was sent. All processes of a machine share the monotonic clock."""
    return time.monotonic_ns() - int(job.payload["sent"])
