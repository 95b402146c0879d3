"""Handlers with runs_in="process": the child process imports this module by name."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg

import rota

app = rota.App("processes")


@app.handler("report_process", runs_in="process")
def report_process(job: rota.SyncJob[Any]) -> dict[str, Any]:
    """Return the process id, the attempt and the payload."""
    logging.getLogger("theirs").warning("from the child")
    return {"pid": os.getpid(), "attempt": job.attempt, "payload": job.payload}


@app.handler("wait_for_stop", runs_in="process")
def wait_for_stop(job: rota.SyncJob[Any]) -> str | None:
    """Wait until the job is asked to stop; return the reason and save it in the checkpoint."""
    job.report_progress(0.5)
    job.wait_for_stop(timedelta(seconds=30))
    job.save_checkpoint({"reason": job.stop_reason})
    return job.stop_reason


@app.handler("commit_with_completion", runs_in="process")
def commit_with_completion(job: rota.SyncJob[Any]) -> None:
    """Commit an effect together with the completion."""
    with job.transaction() as conn:
        conn.execute("insert into effects values (%s)", (job.job_id,))


@app.handler("commit_with_completion_async", runs_in="process")
async def commit_with_completion_async(job: rota.Job[Any]) -> None:
    """Do the same as a coroutine."""
    await job.save_checkpoint({"step": 1})
    await job.report_progress(0.1, "begun")
    async with job.transaction() as conn:
        await conn.execute("insert into effects values ($1)", job.job_id)


@app.handler("complete_in_own_transaction", runs_in="process")
def complete_in_own_transaction(job: rota.SyncJob[dict[str, str]]) -> None:
    """Complete the job in a transaction that the handler has opened itself."""
    with psycopg.connect(job.payload["dsn"]) as conn:
        job.guard(conn, "effects")
        conn.execute("insert into effects values (%s)", (job.job_id,))
        job.complete(conn, {"done": True})


@app.handler("complete_in_own_transaction_async", runs_in="process")
async def complete_in_own_transaction_async(job: rota.Job[dict[str, str]]) -> None:
    """Do the same as a coroutine."""
    conn = await asyncpg.connect(job.payload["dsn"])
    async with conn.transaction():
        await job.guard(conn, "effects")
        await conn.execute("insert into effects values ($1)", job.job_id)
        await job.complete(conn, {"done": True})
    await conn.close()


@app.handler("commit_steps", runs_in="process", backoff=[timedelta(milliseconds=1)])
def commit_steps(job: rota.SyncJob[dict[str, str]]) -> Any:
    """Commit an effect with a checkpoint, roll one back, then commit the last one with the completion."""
    if job.attempt < 3:
        with job.transaction(checkpoint={"step": job.attempt}) as conn:
            conn.execute("insert into effects values (%s)", (job.job_id,))
            if job.attempt == 2:
                raise ValueError("this step is taken back")
        with psycopg.connect(job.payload["dsn"]) as own_conn:
            own_conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # a heartbeat may write the row meanwhile
            job.save_checkpoint({"step": job.checkpoint["step"] + 1}, own_conn)
        raise ValueError("the first steps stay")
    with job.transaction() as conn:
        [(isolation,)] = conn.execute("show transaction_isolation")
        conn.execute("insert into effects values (%s)", (job.job_id,))
        if (job.checkpoint, isolation) != ({"step": 2}, "read committed"):
            raise rota.Permanent(f"{job.checkpoint} in {isolation}")


@app.handler("commit_steps_async", runs_in="process", backoff=[timedelta(milliseconds=1)])
async def commit_steps_async(job: rota.Job[dict[str, str]]) -> Any:
    """Do the same as a coroutine."""
    if job.attempt < 3:
        async with job.transaction(checkpoint={"step": job.attempt}) as conn:
            await conn.execute("insert into effects values ($1)", job.job_id)
            if job.attempt == 2:
                raise ValueError("this step is taken back")
        own_conn = await asyncpg.connect(
            job.payload["dsn"], server_settings={"default_transaction_isolation": "read committed"}
        )
        await job.save_checkpoint({"step": job.checkpoint["step"] + 1}, own_conn)
        await own_conn.close()
        raise ValueError("the first steps stay")
    async with job.transaction() as conn:
        isolation = await conn.fetchval("show transaction_isolation")
        await conn.execute("insert into effects values ($1)", job.job_id)
        if (job.checkpoint, isolation) != ({"step": 2}, "read committed"):
            raise rota.Permanent(f"{job.checkpoint} in {isolation}")


SHOW_IDLE_TIMEOUT = "show idle_in_transaction_session_timeout"


@app.handler("show_idle_timeout", runs_in="process")
def show_idle_timeout(job: rota.SyncJob[Any]) -> Any:
    """Return the idle timeout of the handler's transaction."""
    with job.transaction(checkpoint=1) as conn:
        [(limit,)] = conn.execute(SHOW_IDLE_TIMEOUT)
    return limit


@app.handler("show_idle_timeout_async", runs_in="process")
async def show_idle_timeout_async(job: rota.Job[Any]) -> Any:
    """Do the same as a coroutine."""
    async with job.transaction(checkpoint=1) as conn:
        return await conn.fetchval(SHOW_IDLE_TIMEOUT)


STEAL_JOB = (
    "update rota.jobs set fence_token = nextval('rota.fence_tokens'), leased_by = gen_random_uuid() where job_id = %s"
)


@app.handler("write_with_stale_token", runs_in="process")
def write_with_stale_token(job: rota.SyncJob[dict[str, str]]) -> None:
    """Write after another node has claimed the job; every write must raise StaleToken."""
    with psycopg.connect(job.payload["dsn"], autocommit=True) as conn:
        conn.execute(STEAL_JOB, (job.job_id,))
        for write in (job.complete, lambda own_conn: job.save_checkpoint(1, own_conn)):
            try:
                write(conn)
            except rota.StaleToken:
                continue
            raise AssertionError("a straggler's write was taken")


@app.handler("exit_without_result", runs_in="process", max_attempts=1)
def exit_without_result(_: rota.SyncJob[Any]) -> None:
    """End the process without a result."""
    sys.stdout.flush()
    os._exit(3)
