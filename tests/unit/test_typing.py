"""mypy on a user's file: correct calls pass, wrong ones are errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rota

USER_FILE = """
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import psycopg
import rota
from rota.testing import make_job, make_sync_job, perform

app = rota.App("shop")


@dataclass
class Receipt:
    order: int


@app.handler("send_receipt", queue="mail", timeout=timedelta(seconds=30), backoff=[timedelta(minutes=1)])
async def send_receipt(job: rota.Job[Receipt]) -> int:
    async with job.transaction() as conn:
        await job.guard(conn, f"order:{job.payload.order}")
    return job.payload.order


@app.handler("plain")
def plain(job: rota.SyncJob[Receipt]) -> None:
    with job.transaction() as conn:
        conn.execute("select 1")


@app.middleware
async def timed(job: rota.Job[Any], call_next: Any) -> Any:
    return await call_next(job)


async def right(conn: asyncpg.Connection[Any], blocking: psycopg.Connection[Any]) -> None:
    made: rota.Enqueued = await send_receipt.enqueue(conn, Receipt(7), run_at=datetime.now(UTC), unique_key="k")
    count: int = await send_receipt.enqueue_many(conn, [Receipt(made.job_id)], priority=1)
    plain.enqueue_sync(blocking, Receipt(count))
    number: int = await send_receipt(make_job(Receipt(7)))
    plain(make_sync_job(Receipt(7)))
    await rota.enqueue(conn, "anything", {"n": number})
    rota.enqueue_sync(blocking, "anything")
    await perform(app, "send_receipt", Receipt(7))


async def wrong(conn: asyncpg.Connection[Any], blocking: psycopg.Connection[Any]) -> None:
    await send_receipt.enqueue(conn, 7)  # WRONG arg-type
    await send_receipt.enqueue(conn, {"order": 7})  # WRONG arg-type
    await send_receipt.enqueue(conn, Receipt(7), prority=1)  # WRONG call-arg
    await send_receipt.enqueue(conn, Receipt(7), run_at="now")  # WRONG arg-type
    await send_receipt.enqueue_many(conn, [7])  # WRONG list-item
    await send_receipt.enqueue(blocking, Receipt(7))  # WRONG arg-type
    await send_receipt(make_job(7))  # WRONG arg-type
    plain.enqueue_sync(blocking, None)  # WRONG arg-type
    plain(make_job(Receipt(7)))  # WRONG arg-type
    await send_receipt(make_sync_job(Receipt(7)))  # WRONG arg-type
    await rota.enqueue(blocking, "anything")  # WRONG arg-type
"""


def test_mypy_accepts_correct_calls_and_refuses_wrong_payload_types(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(USER_FILE)
    source = Path(rota.__file__).parents[1]
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            f"--cache-dir={tmp_path / 'cache'}",
            "jobs.py",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(source)},
        check=False,
    )
    own = [line for line in checked.stdout.splitlines() if line.startswith("jobs.py:") and ": error:" in line]
    found = {(int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]")) for line in own}
    expected = {
        (number, line.rsplit("# WRONG ", 1)[1])
        for number, line in enumerate(USER_FILE.splitlines(), 1)
        if "# WRONG" in line
    }
    assert found == expected, checked.stdout + checked.stderr
