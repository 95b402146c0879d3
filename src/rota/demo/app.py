"""The app of `rota demo`, with a handler for each way in which a job can end.

Handlers write a journal of their calls to a file outside the database. At the end it is compared with rota's own tables. Some
effects are rows, written in the transaction that completes the job. Other effects are letters in a mailbox file. A letter carries
the job's idempotency key, so it counts once even if it is delivered again.
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


class OutsideEffects:
    """Effects outside the database: lines appended to files, which no rollback undoes."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._mailbox = folder / "mailbox"

    def write_journal(self, job: AnyJob, what: str, how: str = "") -> None:
        """Append to the journal that a handler `began` or `ended`, and how it ended."""
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
        """Append a letter to the mailbox, with the idempotency key by which it counts once."""
        _append(self._mailbox, key=job.idempotency_key, job_id=job.job_id, fence_token=job.fence_token)


def _append(path: Path, **fields: Any) -> None:
    # A single write in append mode: lines of several processes don't mix, and kill -9 leaves no partial line.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, json.dumps(fields).encode() + b"\n")
    finally:
        os.close(file)


@asynccontextmanager
async def lifespan() -> AsyncIterator[OutsideEffects]:
    """Provide the files to the handlers, and end this daemon when the demo ends."""
    folder = os.environ.get("DEMO_FOLDER")
    if folder is None:
        raise ConfigError("rota.demo.app works only inside `rota demo`. Run that command instead")
    threading.Thread(target=_exit_with_demo, daemon=True).start()
    yield OutsideEffects(Path(folder))


def _exit_with_demo() -> None:
    # Standard input is a pipe that the demo holds open. It closes when the demo ends, even by kill -9.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


app = rota.App("demo", lifespan=lifespan)


@contextmanager
def journalled(job: AnyJob) -> Iterator[OutsideEffects]:
    """Write the start and the end of the handler to the journal. After a kill -9 the end is missing."""
    outside: OutsideEffects = job.state
    outside.write_journal(job, "began")
    try:
        yield outside
    except BaseException as error:
        outside.write_journal(job, "ended", type(error).__name__)
        raise
    outside.write_journal(job, "ended", "returned")


@app.handler("email", backoff_base=timedelta(seconds=0.3))
async def email(job: rota.Job[Any]) -> None:
    """Quick, with an effect outside the database."""
    with journalled(job) as outside:
        await asyncio.sleep(job.payload["seconds"])
        outside.deliver(job)


@app.handler("transfer", queue="slow")
async def transfer(job: rota.Job[Any]) -> None:
    """Slow, with its effect in a transaction. Ignores cancellation, so it still runs after its lease was lost."""
    with journalled(job):
        await _uninterruptible_sleep(job.payload["seconds"])
        async with job.transaction() as conn:
            await _insert_entry(conn, job)


@app.handler("report", queue="reports")
def report(job: rota.SyncJob[Any]) -> None:
    """Slow, in a thread, so it can't be interrupted."""
    with journalled(job) as outside:
        time.sleep(job.payload["seconds"])
        outside.deliver(job)
        job.save_checkpoint({"delivered": True})


@app.handler("charge", delivery="at_most_once")
async def charge(job: rota.Job[Any]) -> None:
    """Slow, and must run at most once."""
    with journalled(job) as outside:
        await asyncio.sleep(job.payload["seconds"])
        outside.deliver(job)


@app.handler("webhook", backoff_base=timedelta(seconds=0.4))
async def webhook(job: rota.Job[Any]) -> None:
    """Fails twice, then succeeds."""
    with journalled(job) as outside:
        if job.attempt <= 2:
            raise ConnectionError("the other side answers 503")
        outside.deliver(job)


@app.handler("import")
async def import_file(job: rota.Job[Any]) -> None:
    """Fails permanently until its row is in demo.repaired."""
    with journalled(job):
        async with job.transaction() as conn:
            if not await _is_repaired(conn, job):
                raise rota.Permanent("the file has a column too many")
            await _insert_entry(conn, job)


@app.handler("thumbnail", backoff_base=timedelta(seconds=0.3))
async def thumbnail(job: rota.Job[Any]) -> None:
    """Kills its daemon until its row is in demo.repaired. Its effect is written before that, and rolled back."""
    with journalled(job):
        async with job.transaction() as conn:
            await _insert_entry(conn, job)
            if not await _is_repaired(conn, job):
                os.kill(os.getpid(), signal.SIGKILL)


@app.handler("embargo")
async def embargo(job: rota.Job[Any]) -> None:
    """Snoozes on the first call, and works on the second."""
    with journalled(job) as outside:
        if job.checkpoint is None:
            await job.save_checkpoint("asked")
            raise rota.Snooze(after=timedelta(seconds=0.5))
        outside.deliver(job)


@app.handler("digest")
async def digest(job: rota.Job[Any]) -> None:
    """Inserted twice with the same unique_key."""
    with journalled(job) as outside:
        outside.deliver(job)


@app.handler("newsletter")
async def newsletter(job: rota.Job[Any]) -> None:
    """Cancelled before it is due."""
    with journalled(job) as outside:
        outside.deliver(job)


async def _uninterruptible_sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(remaining)


async def _insert_entry(conn: Connection, job: rota.Job[Any]) -> None:
    await conn.execute("insert into demo.entries (job_id, fence_token) values ($1, $2)", job.job_id, job.fence_token)


async def _is_repaired(conn: Connection, job: rota.Job[Any]) -> bool:
    found: bool = await conn.fetchval("select exists (select from demo.repaired where handler = $1)", job.handler)
    return found
