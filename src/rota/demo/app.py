"""The app that `rota demo` runs: one handler for each way in which a job can go.

Handlers keep a journal of what they do, in a file outside the database: at the end it is compared with what rota says. Effects are
of two kinds. Some are rows, written in the transaction that completes the job. Others leave the database: a letter dropped into a
mailbox, which counts once because it carries the job's idempotency key, however often it is dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rota
from rota.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rota.db.pool import Connection

    AnyJob = rota.Job[Any] | rota.SyncJob[Any]


class Outside:
    """The world outside the database: lines appended to files, which no rollback takes back."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._mailbox = folder / "mailbox"

    def note(self, job: AnyJob, what: str, how: str = "") -> None:
        """Write into the journal what a handler did."""
        _append(
            self._journal,
            what=what,
            how=how,
            job_id=job.job_id,
            handler=job.handler,
            fence_token=job.fence_token,
            pid=os.getpid(),
            at=time.time(),
        )

    def deliver(self, job: AnyJob) -> None:
        """Drop a letter into the mailbox, with the key by which it counts once."""
        _append(self._mailbox, key=job.idempotency_key, job_id=job.job_id, fence_token=job.fence_token)


def _append(path: Path, **fields: Any) -> None:
    # One write in append mode: lines of several processes don't mix, and a process killed after it has written it all.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, json.dumps(fields).encode() + b"\n")
    finally:
        os.close(file)


@asynccontextmanager
async def lifespan() -> AsyncIterator[Outside]:
    """Open the world outside, and see to it that no daemon outlives the demo."""
    folder = os.environ.get("DEMO_FOLDER")
    if folder is None:
        raise ConfigError("rota.demo.app belongs to `rota demo`, which starts it: run that")
    threading.Thread(target=_die_with_the_demo, daemon=True).start()
    yield Outside(Path(folder))


def _die_with_the_demo() -> None:
    # Our standard input is a pipe that the demo holds open: it ends when the demo does, however that ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


app = rota.App("demo", lifespan=lifespan)


@contextmanager
def in_the_journal(job: AnyJob) -> Iterator[Outside]:
    """Note that the handler begins, and how it ends; after a kill -9 the end is missing."""
    outside: Outside = job.state
    outside.note(job, "began")
    try:
        yield outside
    except BaseException as error:
        outside.note(job, "ended", type(error).__name__)
        raise
    outside.note(job, "ended", "returned")


@app.handler("email", backoff_base=timedelta(seconds=0.3))
async def email(job: rota.Job[Any]) -> None:
    """Quick, and the world outside is told."""
    with in_the_journal(job) as outside:
        await asyncio.sleep(job.payload["seconds"])
        outside.deliver(job)


@app.handler("transfer", queue="slow")
async def transfer(job: rota.Job[Any]) -> None:
    """Slow, its effect in a transaction; and the worst of zombies, for it goes on when it is told to stop."""
    with in_the_journal(job):
        await _deaf_sleep(job.payload["seconds"])
        async with job.transaction() as conn:
            await _enter(conn, job)


@app.handler("report", queue="reports")
def report(job: rota.SyncJob[Any]) -> None:
    """Slow, in a thread, which nothing can interrupt."""
    with in_the_journal(job) as outside:
        time.sleep(job.payload["seconds"])
        outside.deliver(job)
        job.save_checkpoint({"delivered": True})


@app.handler("charge", delivery="at_most_once")
async def charge(job: rota.Job[Any]) -> None:
    """Slow, and never to be tried twice."""
    with in_the_journal(job) as outside:
        await asyncio.sleep(job.payload["seconds"])
        outside.deliver(job)


@app.handler("webhook", backoff_base=timedelta(seconds=0.4))
async def webhook(job: rota.Job[Any]) -> None:
    """Fails twice, then succeeds."""
    with in_the_journal(job) as outside:
        if job.attempt <= 2:
            raise ConnectionError("the other side answers 503")
        outside.deliver(job)


@app.handler("import")
async def import_file(job: rota.Job[Any]) -> None:
    """Can't work before somebody has repaired what is wrong."""
    with in_the_journal(job):
        async with job.transaction() as conn:
            if not await _repaired(conn, job):
                raise rota.Permanent("the file has a column too many")
            await _enter(conn, job)


@app.handler("thumbnail", backoff_base=timedelta(seconds=0.3))
async def thumbnail(job: rota.Job[Any]) -> None:
    """Kills whoever runs it, until somebody has repaired what is wrong. Its effect is written before, and taken back."""
    with in_the_journal(job):
        async with job.transaction() as conn:
            await _enter(conn, job)
            if not await _repaired(conn, job):
                os.kill(os.getpid(), signal.SIGKILL)


@app.handler("embargo")
async def embargo(job: rota.Job[Any]) -> None:
    """Comes too early, and asks to be called again later."""
    with in_the_journal(job) as outside:
        if job.checkpoint is None:
            await job.save_checkpoint("asked")
            raise rota.Snooze(after=timedelta(seconds=0.5))
        outside.deliver(job)


@app.handler("digest")
async def digest(job: rota.Job[Any]) -> None:
    """Is inserted twice, under one unique_key."""
    with in_the_journal(job) as outside:
        outside.deliver(job)


@app.handler("newsletter")
async def newsletter(job: rota.Job[Any]) -> None:
    """Is cancelled before its time comes."""
    with in_the_journal(job) as outside:
        outside.deliver(job)


async def _deaf_sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


async def _enter(conn: Connection, job: rota.Job[Any]) -> None:
    await conn.execute("insert into demo.entries (job_id, fence_token) values ($1, $2)", job.job_id, job.fence_token)


async def _repaired(conn: Connection, job: rota.Job[Any]) -> bool:
    found: bool = await conn.fetchval("select exists (select from demo.repaired where handler = $1)", job.handler)
    return found
