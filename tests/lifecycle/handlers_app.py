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


@app.handler("dies", runs_in="process", max_attempts=1)
def dies(_: rota.SyncJob[Any]) -> None:
    """Die without a word."""
    sys.stdout.flush()
    os._exit(3)
