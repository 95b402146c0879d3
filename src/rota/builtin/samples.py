"""Sample handlers that `rota dev` adds to the app, so that a first INSERT has something to run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.app import App
from rota.handler_exceptions import Permanent
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Mapping

app = App("rota")


@app.handler("rota.echo")
async def echo(job: Job[Any]) -> Any:
    """Return the payload as the result."""
    return job.payload


@app.handler("rota.sleep")
async def sleep(job: Job[Any]) -> None:
    """Sleep for `seconds` (default 1) and report progress."""
    seconds = max(0.0, float(_options(job).get("seconds", 1)))
    steps = max(1, int(seconds))
    for step in range(steps):
        await asyncio.sleep(seconds / steps)
        await job.report_progress((step + 1) / steps)


@app.handler("rota.fail")
async def fail(job: Job[Any]) -> None:
    """Fail the first `times` attempts (default: all). With `permanent`, the job becomes a dead letter at once."""
    options = _options(job)
    if options.get("permanent"):
        raise Permanent("rota.fail was asked to fail for good")
    if job.attempt <= int(options.get("times", job.attempt)):
        raise RuntimeError(f"rota.fail was asked to fail, and this is attempt {job.attempt}")


def _options(job: Job[Any]) -> Mapping[str, Any]:
    if not isinstance(job.payload, dict):
        raise Permanent(f"{job.handler} takes an object as its payload")
    return job.payload
