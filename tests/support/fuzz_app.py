"""The handlers of the fuzzer's jobs: all kinds of handlers and all ways to fail."""

from __future__ import annotations

import asyncio
import random
import threading
from datetime import timedelta
from typing import Any

import pydantic

import rota

app = rota.App("fuzz")


class Order(pydantic.BaseModel):
    """A payload with a type."""

    order: int
    note: str = ""


class Unprintable(Exception):
    """An exception whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


UNUSUAL_ERRORS: tuple[BaseException, ...] = (
    ValueError("\x00 \ud800 \u202e [/] \x1b[31m"),
    ValueError("x" * 100_000),
    Unprintable(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError("not by rota"),
    ExceptionGroup("many", [ValueError(1), ExceptionGroup("more", [Unprintable()])]),
    rota.Permanent("\x00 for good"),
    rota.Cancel("\x00 moot"),
    rota.Retry(after=timedelta(seconds=0)),
    rota.Retry(after=timedelta(days=365)),
    rota.Snooze(after=timedelta(days=365)),
    MemoryError(),
    RecursionError(),
    StopAsyncIteration(),
    TimeoutError(),
    OSError(28, "No space left on device"),
)
CIRCULAR_LIST: list[Any] = []
CIRCULAR_LIST.append(CIRCULAR_LIST)
RESULTS: tuple[Any, ...] = (
    object(),
    float("nan"),
    float("inf"),
    10**5000,
    CIRCULAR_LIST,
    "\x00",
    "\ud800",
    "x" * 20_000,
    {1: 2},
    {("a",): 1},
    b"bytes",
    [[]] * 100_000,
)


async def pause(seconds: float) -> None:
    """Wait, as work does."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


@app.handler("canary", queue="canary")
async def canary(job: rota.Job[Any]) -> None:
    """Succeed at once."""


@app.handler("ok")
async def ok(job: rota.Job[Any]) -> None:
    """Succeed at once."""


@app.handler("fails")
async def fails(job: rota.Job[Any]) -> None:
    """Raise an error that contains the payload."""
    raise ValueError(f"cannot use {job.payload!r}")


@app.handler("ends")
async def ends(_: rota.Job[Any]) -> None:
    """Raise an unusual error."""
    raise random.choice(UNUSUAL_ERRORS)


@app.handler("returns")
async def returns(job: rota.Job[Any]) -> Any:
    """Return something that may not be storable."""
    return random.choice([*RESULTS, job.payload])


@app.handler("slow")
async def slow(_: rota.Job[Any]) -> None:
    """Run for a while."""
    await pause(random.uniform(0.1, 2))


@app.handler("thread")
def thread(job: rota.SyncJob[Any]) -> Any:
    """Block a thread for a moment, then fail, return the payload, or raise an unusual error."""
    threading.Event().wait(random.uniform(0, 0.5))
    if random.random() < 0.3:
        raise random.choice(UNUSUAL_ERRORS)
    return job.payload


@app.handler("apart", runs_in="process", queue="apart")
def apart(job: rota.SyncJob[Any]) -> Any:
    """Do the same in a process, or kill the process."""
    if random.random() < 0.3:
        raise random.choice(UNUSUAL_ERRORS)
    return random.choice([*RESULTS, job.payload])


@app.handler("typed")
async def typed(job: rota.Job[Order]) -> None:
    """Take only payloads of its type."""


@app.handler("writes")
async def writes(job: rota.Job[Any]) -> None:
    """Store the payload as checkpoint, progress, row and result."""
    await job.save_checkpoint(job.payload)
    await job.report_progress(0.5, str(job.payload)[:600])
    async with job.transaction(checkpoint=job.payload) as conn:
        await conn.execute("select 1")
    raise rota.Snooze(after=timedelta(seconds=random.uniform(0, 5)))


@app.handler("transacts")
async def transacts(job: rota.Job[Any]) -> None:
    """Complete in a transaction that the payload may make fail."""
    async with job.transaction() as conn:
        await conn.execute("select $1::text::int", str(job.payload)[:50])


@app.handler("once", delivery="at_most_once")
async def once(_: rota.Job[Any]) -> None:
    """Run at most once, and fail in half of the cases."""
    if random.random() < 0.5:
        raise ValueError("once is enough")
