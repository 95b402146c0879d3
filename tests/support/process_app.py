"""The app of the daemons that tests start as processes.

Each handler records its start and end. It records them in separate transactions on connections of its own, with the
server's clock. WITNESS_DSN may name another server, which the test leaves running.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pydantic

import rota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

    from asyncpg import Pool, Record

WITNESS = """
create table executions (
    job_id bigint, fence_token bigint, attempt int, handler text, pid int, key text, reason text,
    started_at timestamptz, stopped_at timestamptz,
    primary key (job_id, fence_token, pid)
)
"""
"""The table that the tests create in the database of WITNESS_DSN."""

EFFECTS = "create table effects (job_id bigint, fence_token bigint, step int, at timestamptz default clock_timestamp())"
"""The table in the daemon's database that handlers write in job.transaction()."""


PROCESS_TREE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], process_group=0)]
with open(sys.argv[1] + ".new", "w") as file:
    print(os.getpid(), *[child.pid for child in children], file=file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
children[0].wait()
"""
"""A program with two children, one of them in a process group of its own. It writes the pids to the file in its argument."""


class Witness:
    """Records the executions of handlers."""

    def __init__(self) -> None:
        self._pool: Pool[Record] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Witness]:
        """Keep a few connections open for the life of the app."""
        self._loop = asyncio.get_running_loop()
        if not (dsn := os.environ.get("WITNESS_DSN")):
            yield self
            return
        settings = {"application_name": "witness"}
        self._pool = await asyncpg.create_pool(dsn, min_size=0, max_size=4, server_settings=settings)
        try:
            yield self
        finally:
            self._pool.terminate()

    @asynccontextmanager
    async def record(self, job: rota.Job[Any]) -> AsyncIterator[None]:
        """Record the start of this execution and, after any outcome of the block, its end."""
        try:
            await self._record_start(job)
            yield
        finally:
            await self._record_end(job)

    @contextmanager
    def record_in_thread(self, job: rota.SyncJob[Any]) -> Iterator[None]:
        """Do the same for a handler in a thread."""
        try:
            self._wait(self._record_start(job))
            yield
        finally:
            self._wait(self._record_end(job))

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _record_start(self, job: rota.Job[Any] | rota.SyncJob[Any]) -> None:
        if self._pool is not None:
            await self._write(
                """
                insert into executions (job_id, fence_token, attempt, handler, pid, key, started_at)
                values ($1, $2, $3, $4, $5, $6, clock_timestamp())
                on conflict do nothing
                """,
                *(job.job_id, job.fence_token, job.attempt, job.handler, os.getpid(), job.idempotency_key),
            )

    async def _record_end(self, job: rota.Job[Any] | rota.SyncJob[Any]) -> None:
        if self._pool is not None:
            # The start may be missing if its write was interrupted.
            await self._write(
                """
                insert into executions (job_id, fence_token, pid, reason, stopped_at)
                values ($1, $2, $3, $4, clock_timestamp())
                on conflict (job_id, fence_token, pid)
                do update set stopped_at = excluded.stopped_at, reason = excluded.reason
                """,
                *(job.job_id, job.fence_token, os.getpid(), job.stop_reason),
            )

    async def _write(self, sql: str, *values: Any) -> None:
        # Retry while the witness's server restarts: an error here would fail the job.
        assert self._pool is not None
        for turn in range(50):
            try:
                await self._pool.execute(sql, *values)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
                if turn == 49:
                    raise
                await wait_seconds(0.1)
            else:
                return


witness = Witness()
app = rota.App("processes", lifespan=witness.open)


async def wait_seconds(seconds: float) -> None:
    """Wait, as work does."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        return


def options(job: rota.Job[Any] | rota.SyncJob[Any]) -> dict[str, Any]:
    """Return the payload, which is an object in all jobs of the tests."""
    assert isinstance(job.payload, dict)
    return job.payload


@app.handler("noop")
async def noop(job: rota.Job[Any]) -> None:
    """Do nothing."""


@app.handler("work")
async def work(job: rota.Job[Any]) -> None:
    """Run for `seconds` and record the execution."""
    async with witness.record(job):
        await wait_seconds(float(options(job).get("seconds", 0.01)))


@app.handler("kills")
async def kills(job: rota.Job[Any]) -> None:
    """Kill this process."""
    async with witness.record(job):
        os.kill(os.getpid(), signal.SIGKILL)


@app.handler("once", delivery="at_most_once")
async def once(job: rota.Job[Any]) -> None:
    """Record the execution; delivery is at most once."""
    async with witness.record(job):
        await wait_seconds(float(options(job).get("seconds", 0.01)))


@app.handler("transactional")
async def transactional(job: rota.Job[Any]) -> None:
    """Write an effect that commits with the completion, and keep the transaction open for `seconds`."""
    async with witness.record(job), job.transaction() as conn:
        await conn.execute("insert into effects values ($1, $2, 0)", job.job_id, job.fence_token)
        await wait_seconds(float(options(job).get("seconds", 0.01)))


@app.handler("transactional thread")
def transactional_thread(job: rota.SyncJob[Any]) -> None:
    """In a thread, run a statement that takes `seconds` in a transaction."""
    with job.transaction() as conn:
        conn.execute("select pg_sleep(%s)", (options(job)["seconds"],))


@app.handler("flaky")
async def flaky(job: rota.Job[Any]) -> None:
    """Fail with the probability `fails`."""
    async with witness.record(job):
        if random.random() < float(options(job).get("fails", 0.4)):
            raise RuntimeError("flaky, as asked")


@app.handler("thread")
def thread(job: rota.SyncJob[Any]) -> None:
    """Run in a thread for `seconds`, and stop when requested unless `deaf`."""
    with witness.record_in_thread(job):
        seconds = float(options(job).get("seconds", 0.01))
        if options(job).get("deaf"):
            threading.Event().wait(seconds)
        elif job.wait_for_stop(timedelta(seconds=seconds)):
            raise InterruptedError("left early, as asked")  # returning would mean success


@app.handler("blocks")
async def blocks(job: rota.Job[Any]) -> None:
    """Block the main loop for `seconds`."""
    async with witness.record(job):
        threading.Event().wait(float(options(job).get("seconds", 60)))


@app.handler("prints")
async def prints(job: rota.Job[Any]) -> None:
    """Print `text`, or that many `lines`."""
    for _ in range(options(job).get("lines", 1)):
        print(options(job)["text"])  # noqa: T201  what this is about


@app.handler("steps")
async def steps(job: rota.Job[Any]) -> None:
    """Commit `steps` effects one by one, each with its checkpoint."""
    async with witness.record(job):
        for step in range(int(job.checkpoint or 0), int(options(job).get("steps", 3))):
            await wait_seconds(0.05)
            async with job.transaction(checkpoint=step + 1) as conn:
                await conn.execute("insert into effects values ($1, $2, $3)", job.job_id, job.fence_token, step)


@app.handler("snoozes")
async def snoozes(job: rota.Job[Any]) -> None:
    """Snooze a few times, then succeed."""
    async with witness.record(job):
        slept = int(job.checkpoint or 0)
        if slept < int(options(job).get("times", 2)):
            await job.save_checkpoint(slept + 1)
            raise rota.Snooze(after=timedelta(milliseconds=300))


@app.handler("ignores_interruption")
async def ignores_interruption(job: rota.Job[Any]) -> None:
    """Ignore the first interruption, then try a checkpoint, progress and a transaction with a stale token."""
    try:
        # Inside the try: the test may stop the process as soon as it sees the recorded start.
        async with witness.record(job):
            await wait_seconds(float(options(job).get("seconds", 30)))
    except asyncio.CancelledError:
        for name, attempt in (("checkpoint", _checkpoint), ("progress", _progress), ("transaction", _transaction)):
            for _ in range(5):
                try:
                    await attempt(job)
                except rota.StaleToken:
                    break
                except OSError:
                    continue  # a statement that was running when the process was stopped
                raise AssertionError(f"a zombie's {name} was let through") from None
        raise


async def _checkpoint(job: rota.Job[Any]) -> None:
    await job.save_checkpoint({"zombie": True})


async def _progress(job: rota.Job[Any]) -> None:
    await job.report_progress(0.5, "zombie")


async def _transaction(job: rota.Job[Any]) -> None:
    async with job.transaction() as conn:
        await conn.execute("insert into effects values ($1, $2, -1)", job.job_id, job.fence_token)


@app.handler("blocks_in_coroutine")
async def blocks_in_coroutine(job: rota.Job[Any]) -> None:
    """Block the main loop for `seconds` in a coroutine."""
    threading.Event().wait(float(options(job)["seconds"]))


@app.handler("raises_payload")
async def raises_payload(job: rota.Job[Any]) -> None:
    """Raise an error that contains the payload."""
    raise ValueError(f"can't use {job.payload!r}")


@app.handler("fails_in_database")
async def fails_in_database(job: rota.Job[Any]) -> None:
    """Cause a database error that contains the payload, and run a slow statement that shows it."""
    async with job.transaction() as conn:
        await conn.execute("select pg_sleep($1)", float(options(job).get("seconds", 0)))
        await conn.execute("select $1::text::int", str(options(job).get("password")))


class Login(pydantic.BaseModel):
    """A payload with a type."""

    user: str
    password: int


@app.handler("typed")
async def typed(job: rota.Job[Login]) -> None:
    """Take only payloads of its type."""


@app.handler("raises_permanent")
async def raises_permanent(job: rota.Job[Any]) -> None:
    """Raise Permanent from an error that shows the payload."""
    try:
        os.environ[json.dumps(job.payload)]
    except KeyError as error:
        raise rota.Permanent(f"no use: {options(job)}") from error


def _stray(payload: Any) -> None:
    raise ValueError(f"can't use {payload!r}")


class RaisesInDestructor:
    """Raises an error in its destructor."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload

    def __del__(self) -> None:
        """Raise an error with the payload."""
        _stray(self.payload)


@app.handler("raises_in_thread")
async def raises_in_thread(job: rota.Job[Any]) -> None:
    """Raise errors in threads and destructors."""
    RaisesInDestructor(job.payload)
    thread = threading.Thread(target=_stray, args=(job.payload,))
    thread.start()
    thread.join()


@app.handler("raises_in_process_thread", runs_in="process")
def raises_in_process_thread(job: rota.SyncJob[Any]) -> None:
    """Do the same in a process."""
    RaisesInDestructor(job.payload)
    thread = threading.Thread(target=_stray, args=(job.payload,))
    thread.start()
    thread.join()


@app.handler("cancels_loop")
async def cancels_loop(job: rota.Job[Any]) -> None:
    """Cancel one of the daemon's loops from a thread that belongs to no job."""
    loop = asyncio.get_running_loop()
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == options(job)["loop"]]

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel, context=contextvars.Context())

    thread = threading.Thread(target=cancel)
    thread.start()
    thread.join()


def _backtrack() -> None:
    # A single call that holds the interpreter lock for some seconds.
    re.match(r"(a|aa)+$", "a" * 36 + "b")


@app.handler("regex on the loop")
async def regex_on_the_loop(_: rota.Job[Any]) -> None:
    """Hold the interpreter lock on the main loop."""
    _backtrack()


@app.handler("regex in a thread")
def regex_in_a_thread(_: rota.SyncJob[Any]) -> None:
    """Hold the interpreter lock in a thread."""
    _backtrack()


@app.handler("leaves_a_fork")
def leaves_a_fork(job: rota.SyncJob[Any]) -> int:
    """Leave a forked process running for `seconds`."""
    if (pid := os.fork()) == 0:
        threading.Event().wait(options(job)["seconds"])
        os._exit(0)
    return pid


@app.handler("starts_family", runs_in="process")
def starts_family(job: rota.SyncJob[Any]) -> None:
    """Start a tree of processes, write their pids to the file `pids`, and wait."""
    subprocess.run([sys.executable, "-c", PROCESS_TREE, options(job)["pids"]], check=True)


@app.handler("leaves_orphan")
async def leaves_orphan(_: rota.Job[Any]) -> None:
    """Leave an orphan process behind that ends soon."""
    shell = await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.1 & exit 0")
    assert await shell.wait() == 0, "the daemon must not have reaped it"


@app.handler("breaks_loop")
async def breaks_loop(job: rota.Job[Any]) -> None:
    """Break the main loop in the way named by the payload."""
    loop = asyncio.get_running_loop()
    match options(job)["by"]:
        case "exit":
            loop.call_soon(sys.exit, 7)
        case "interrupt":
            loop.call_soon(_raise, KeyboardInterrupt())
        case "exit in a task":
            asyncio.ensure_future(_exit())  # noqa: RUF006  deliberately not awaited
        case "stop":
            loop.stop()
        case "cancel":
            for task in asyncio.all_tasks():
                task.cancel()
        case "close listening":
            for number in _listening_sockets():
                os.close(number)
        case "crash":
            ctypes.string_at(0)
        case "flood":
            for _ in range(100_000):
                loop.call_soon(int)
            tasks = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(100_000)]
            await asyncio.wait(tasks)
    await asyncio.Event().wait()


def _listening_sockets() -> list[int]:
    found = []
    for number in range(3, 256):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(number)
    return found


def _raise(error: BaseException) -> None:
    raise error


async def _exit() -> None:
    sys.exit(7)


@app.handler("apart", runs_in="process")
def apart(job: rota.SyncJob[Any]) -> None:
    """Raise an error with the payload in a process."""
    raise ValueError(f"can't use {job.payload!r}")


@app.handler("forks")
def forks(job: rota.SyncJob[Any]) -> list[int]:
    """Fork processes and end them with SIGTERM, as multiprocessing does."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, job.payload)


@app.handler("forks_apart", runs_in="process")
def forks_apart(job: rota.SyncJob[Any]) -> list[int]:
    """Do the same in a process."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, job.payload)
