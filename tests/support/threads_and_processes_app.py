"""Handlers in threads and processes. Processes import them by name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import rota

app = rota.App("parted")


@app.handler("returns", runs_in="process")
def returns(job: rota.SyncJob[Any]) -> Any:
    """Return the payload, and where the handler ran."""
    return {"payload": job.payload, "pid": os.getpid(), "attempt": job.attempt, "key": job.idempotency_key}


@app.handler("returns async", runs_in="process")
async def returns_async(job: rota.Job[Any]) -> Any:
    """Do the same in a coroutine."""
    return {"payload": job.payload, "pid": os.getpid()}


@app.handler("raises", runs_in="process", max_attempts=1)
def raises(job: rota.SyncJob[Any]) -> None:
    """Raise an error that contains the payload."""
    raise LookupError(f"no such thing: {job.payload['secret']} \x00")


@app.handler("raises_by_name", runs_in="process")
def raises_by_name(job: rota.SyncJob[Any]) -> None:
    """Raise the exception named by the payload."""
    if job.payload == "cancel":
        raise rota.Cancel("moot")
    if job.payload == "permanent":
        raise rota.Permanent("never")
    if job.payload == "snooze":
        raise rota.Snooze(after=timedelta(hours=1))
    raise rota.Retry(after=timedelta(hours=1))


@app.handler("kills_itself", runs_in="process", max_attempts=1)
def kills_itself(job: rota.SyncJob[Any]) -> None:
    """Kill the process."""
    if job.payload == "exit":
        os._exit(7)
    os.kill(os.getpid(), 35 if job.payload == "realtime" else signal.SIGSEGV)  # 35 is a real-time signal without a name


@app.handler("raises_base_exception", runs_in="process", max_attempts=1)
def raises_base_exception(job: rota.SyncJob[Any]) -> None:
    """Raise an exception that `except Exception` does not catch."""
    raise {"cancelled": asyncio.CancelledError, "generator": GeneratorExit, "interrupt": KeyboardInterrupt}[job.payload]


@app.handler(
    "reports_progress", runs_in="process", backoff_base=timedelta(milliseconds=1), backoff_cap=timedelta(milliseconds=1)
)
def reports_progress(job: rota.SyncJob[Any]) -> Any:
    """Save a checkpoint and report progress through the daemon."""
    if job.checkpoint is None:
        job.save_checkpoint({"done": 1})
        job.report_progress(0.5, "half way")
        try:
            job.save_checkpoint("x" * 100_000)
        except rota.InvalidPayload as error:
            raise rota.Retry(after=timedelta(0)) from error
        raise AssertionError("a checkpoint of 100 KB was taken")
    return job.checkpoint


@app.handler("family", runs_in="process", timeout=timedelta(seconds=1), max_attempts=1)
def family(job: rota.SyncJob[Any]) -> None:
    """Start a child, write both pids to a file, and ignore signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    Path(job.payload).write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
    signal.pause()
    signal.pause()


@app.handler("leaves a fork", runs_in="process", max_attempts=1)
def leaves_a_fork(job: rota.SyncJob[Any]) -> None:
    """Fork as multiprocessing does, and be killed. The fork inherits all open descriptors."""
    if child := os.fork():
        Path(job.payload).write_text(str(child), encoding="ascii")
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@app.handler("waits_for_stop", runs_in="process")
def waits_for_stop(job: rota.SyncJob[Any]) -> None:
    """Wait until a stop is requested."""
    Path(job.payload).write_text(str(os.getpid()), encoding="ascii")
    while not job.stop_requested:
        signal.sigtimedwait([], 0.05)


@app.handler("ignores_stop")
def ignores_stop(job: rota.SyncJob[Any]) -> None:
    """Record the start and ignore stop requests in a thread."""
    with Path(job.payload).open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    threading.Event().wait()


async def _leave() -> None:
    sys.exit()


@app.handler("exits in a task")
async def exits_in_a_task(_: rota.Job[Any]) -> None:
    """Raise SystemExit in a separate task, which asyncio passes on to the caller of the loop."""
    await asyncio.gather(_leave())


@app.handler("runs_program", runs_in="process", max_attempts=1)
def runs_program(_: rota.SyncJob[Any]) -> int:
    """Run a program and return when it has ended."""
    return subprocess.run(["sleep", "60"], check=False).returncode
