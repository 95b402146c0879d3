"""The handlers that the fuzzer's jobs call: all kinds of handlers, and all ways to end badly."""

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
    """Its text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ENDS: tuple[BaseException, ...] = (
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
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
RESULTS: tuple[Any, ...] = (
    object(),
    float("nan"),
    float("inf"),
    10**5000,
    CIRCLE,
    "\x00",
    "\ud800",
    "x" * 20_000,
    {1: 2},
    {("a",): 1},
    b"bytes",
    [[]] * 100_000,
)


async def pause(seconds: float) -> None:
    """Let time pass, as work does."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


@app.handler("canary", queue="canary")
async def canary(job: rota.Job[Any]) -> None:
    """Succeed at once."""


@app.handler("ok")
async def ok(job: rota.Job[Any]) -> None:
    """Succeed at once."""


@app.handler("fails")
async def fails(job: rota.Job[Any]) -> None:
    """Repeat the payload in the error, as exceptions do."""
    raise ValueError(f"cannot use {job.payload!r}")


@app.handler("ends")
async def ends(_: rota.Job[Any]) -> None:
    """End in an unusual way."""
    raise random.choice(ENDS)


@app.handler("returns")
async def returns(job: rota.Job[Any]) -> Any:
    """Return something that may not be storable."""
    return random.choice([*RESULTS, job.payload])


@app.handler("slow")
async def slow(_: rota.Job[Any]) -> None:
    """Take a while."""
    await pause(random.uniform(0.1, 2))


@app.handler("thread")
def thread(job: rota.SyncJob[Any]) -> Any:
    """Block a thread for a moment, then fail, return the payload, or end in an unusual way."""
    threading.Event().wait(random.uniform(0, 0.5))
    if random.random() < 0.3:
        raise random.choice(ENDS)
    return job.payload


@app.handler("apart", runs_in="process", queue="apart")
def apart(job: rota.SyncJob[Any]) -> Any:
    """Do the same in a process of its own, or take the process down."""
    if random.random() < 0.3:
        raise random.choice(ENDS)
    return random.choice([*RESULTS, job.payload])


@app.handler("typed")
async def typed(job: rota.Job[Order]) -> None:
    """Take only payloads of its type."""


@app.handler("writes")
async def writes(job: rota.Job[Any]) -> None:
    """Store the payload wherever a handler can: checkpoint, progress, transaction, result."""
    await job.save_checkpoint(job.payload)
    await job.report_progress(0.5, str(job.payload)[:600])
    async with job.transaction(checkpoint=job.payload) as conn:
        await conn.execute("select 1")
    raise rota.Snooze(after=timedelta(seconds=random.uniform(0, 5)))


@app.handler("transacts")
async def transacts(job: rota.Job[Any]) -> None:
    """Complete in a transaction that may fail on the payload."""
    async with job.transaction() as conn:
        await conn.execute("select $1::text::int", str(job.payload)[:50])


@app.handler("once", delivery="at_most_once")
async def once(_: rota.Job[Any]) -> None:
    """Run at most once, and fail half of the times."""
    if random.random() < 0.5:
        raise ValueError("once is enough")
