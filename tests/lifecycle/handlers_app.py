"""Handlers that run in a process of their own, which has to import them by name."""

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


@app.handler("where", runs_in="process")
def where(job: rota.SyncJob[Any]) -> dict[str, Any]:
    """Say where it runs."""
    logging.getLogger("theirs").warning("from the child")
    return {"pid": os.getpid(), "attempt": job.attempt, "payload": job.payload}


@app.handler("stops", runs_in="process")
def stops(job: rota.SyncJob[Any]) -> str | None:
    """Wait for the order to stop, and say why it came."""
    job.report_progress(0.5)
    job.wait_for_stop(timedelta(seconds=30))
    job.save_checkpoint({"reason": job.stop_reason})
    return job.stop_reason


@app.handler("commits", runs_in="process")
def commits(job: rota.SyncJob[Any]) -> None:
    """Commit an effect together with the completion."""
    with job.transaction() as conn:
        conn.execute("insert into effects values (%s)", (job.job_id,))


@app.handler("commits_async", runs_in="process")
async def commits_async(job: rota.Job[Any]) -> None:
    """Do the same on a loop."""
    await job.save_checkpoint({"step": 1})
    await job.report_progress(0.1, "begun")
    async with job.transaction() as conn:
        await conn.execute("insert into effects values ($1)", job.job_id)


@app.handler("completes", runs_in="process")
def completes(job: rota.SyncJob[dict[str, str]]) -> None:
    """Complete in a transaction of its own."""
    with psycopg.connect(job.payload["dsn"]) as conn:
        job.guard(conn, "effects")
        conn.execute("insert into effects values (%s)", (job.job_id,))
        job.complete(conn, {"done": True})


@app.handler("completes_async", runs_in="process")
async def completes_async(job: rota.Job[dict[str, str]]) -> None:
    """Do the same on a loop."""
    conn = await asyncpg.connect(job.payload["dsn"])
    async with conn.transaction():
        await job.guard(conn, "effects")
        await conn.execute("insert into effects values ($1)", job.job_id)
        await job.complete(conn, {"done": True})
    await conn.close()


@app.handler("steps", runs_in="process", backoff=[timedelta(milliseconds=1)])
def steps(job: rota.SyncJob[dict[str, str]]) -> Any:
    """Commit an effect with each checkpoint, and the last one with the completion; fail in between."""
    if job.attempt < 3:
        with job.transaction(checkpoint={"step": job.attempt}) as conn:
            conn.execute("insert into effects values (%s)", (job.job_id,))
            if job.attempt == 2:
                raise ValueError("this step is taken back")
        with psycopg.connect(job.payload["dsn"]) as theirs:
            theirs.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # a heartbeat may come in between
            job.save_checkpoint({"step": job.checkpoint["step"] + 1}, theirs)
        raise ValueError("the first steps stay")
    with job.transaction() as conn:
        [(isolation,)] = conn.execute("show transaction_isolation")
        conn.execute("insert into effects values (%s)", (job.job_id,))
        if (job.checkpoint, isolation) != ({"step": 2}, "read committed"):
            raise rota.Permanent(f"{job.checkpoint} in {isolation}")


@app.handler("steps_async", runs_in="process", backoff=[timedelta(milliseconds=1)])
async def steps_async(job: rota.Job[dict[str, str]]) -> Any:
    """Do the same on a loop."""
    if job.attempt < 3:
        async with job.transaction(checkpoint={"step": job.attempt}) as conn:
            await conn.execute("insert into effects values ($1)", job.job_id)
            if job.attempt == 2:
                raise ValueError("this step is taken back")
        theirs = await asyncpg.connect(
            job.payload["dsn"], server_settings={"default_transaction_isolation": "read committed"}
        )
        await job.save_checkpoint({"step": job.checkpoint["step"] + 1}, theirs)
        await theirs.close()
        raise ValueError("the first steps stay")
    async with job.transaction() as conn:
        isolation = await conn.fetchval("show transaction_isolation")
        await conn.execute("insert into effects values ($1)", job.job_id)
        if (job.checkpoint, isolation) != ({"step": 2}, "read committed"):
            raise rota.Permanent(f"{job.checkpoint} in {isolation}")


SHOW = "show idle_in_transaction_session_timeout"


@app.handler("idles", runs_in="process")
def idles(job: rota.SyncJob[Any]) -> Any:
    """Say for how long its transaction may idle."""
    with job.transaction(checkpoint=1) as conn:
        [(limit,)] = conn.execute(SHOW)
    return limit


@app.handler("idles_async", runs_in="process")
async def idles_async(job: rota.Job[Any]) -> Any:
    """Do the same on a loop."""
    async with job.transaction(checkpoint=1) as conn:
        return await conn.fetchval(SHOW)


STEAL = (
    "update rota.jobs set fence_token = nextval('rota.fence_tokens'), leased_by = gen_random_uuid() where job_id = %s"
)


@app.handler("straggles", runs_in="process")
def straggles(job: rota.SyncJob[dict[str, str]]) -> None:
    """Write after the claim has become somebody else's."""
    with psycopg.connect(job.payload["dsn"], autocommit=True) as conn:
        conn.execute(STEAL, (job.job_id,))
        for write in (job.complete, lambda theirs: job.save_checkpoint(1, theirs)):
            try:
                write(conn)
            except rota.StaleToken:
                continue
            raise AssertionError("a straggler's write was taken")


@app.handler("dies", runs_in="process", max_attempts=1)
def dies(_: rota.SyncJob[Any]) -> None:
    """Die without a word."""
    sys.stdout.flush()
    os._exit(3)
