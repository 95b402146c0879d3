"""Handlers in threads, which cannot be stopped from outside, and in processes, which can."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

import rota
import threads_and_processes_app
from in_process_daemons import (
    dead_letter,
    failed_attempts,
    final_outcome,
    insert_job,
    ledger_rows,
    live_row,
    run_node,
    wait_for_claim,
)
from processes import Daemons
from rota.daemon.daemon import HANDLER_LEFT_BEHIND
from rota.handlers import python as python_module
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

REFERENCE = "threads_and_processes_app:app"


@pytest.fixture(autouse=True)
def _importable_app(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(threads_and_processes_app.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_process_may_return_raise_and_request_retries_like_any_other_handler(
    database: Database, conn: Connection[Record]
) -> None:
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE, queues="default:4") as node:
        jobs = {
            "plain": await insert_job(conn, "returns", '{"big": 123456789012345678901234567890}'),
            "async": await insert_job(conn, "returns async", "[1]"),
            "raised": await insert_job(conn, "raises", '{"secret": "s3cret-canary"}'),
            "segv": await insert_job(conn, "kills_itself", '"segv"'),
            "realtime": await insert_job(conn, "kills_itself", '"realtime"'),
            "exit": await insert_job(conn, "kills_itself", '"exit"'),
            "cancelled": await insert_job(conn, "raises_base_exception", '"cancelled"'),
            "generator": await insert_job(conn, "raises_base_exception", '"generator"'),
            "interrupt": await insert_job(conn, "raises_base_exception", '"interrupt"'),
            "cancel": await insert_job(conn, "raises_by_name", '"cancel"'),
            "permanent": await insert_job(conn, "raises_by_name", '"permanent"'),
        }
        waiting = {request: await insert_job(conn, "raises_by_name", f'"{request}"') for request in ("snooze", "retry")}
        ends = {name: await final_outcome(conn, job_id, within=30) for name, job_id in jobs.items()}
        assert ends == {
            "plain": "succeeded",
            "async": "succeeded",
            "raised": "dead: exhausted",
            "segv": "dead: exhausted",
            "realtime": "dead: exhausted",
            "exit": "dead: exhausted",
            "cancelled": "dead: exhausted",
            "generator": "dead: exhausted",
            "interrupt": "dead: exhausted",
            "cancel": "cancelled",
            "permanent": "dead: permanent",
        }

        result = json.loads((await ledger_rows(conn, jobs["plain"]))[0]["result"])
        assert result["payload"] == {"big": 123456789012345678901234567890}
        assert result["pid"] != os.getpid()
        assert result["key"].startswith("rota:")

        dead = await dead_letter(conn, jobs["raised"])
        assert dead["error_kind"] == "LookupError"
        assert "s3cret" not in dead["error"]
        assert "SIGSEGV" in (await dead_letter(conn, jobs["segv"]))["error"]
        assert "ended with signal 35 before" in (await dead_letter(conn, jobs["realtime"]))["error"]
        assert "exit code 7" in (await dead_letter(conn, jobs["exit"]))["error"]

        for name, kind in (
            ("cancelled", "CancelledError"),
            ("generator", "GeneratorExit"),
            ("interrupt", "KeyboardInterrupt"),
        ):
            assert (await dead_letter(conn, jobs[name]))["error_kind"] == kind
        for request, job_id in waiting.items():
            await node.wait_for_event("job.settled", job_id=job_id)
            row = await live_row(conn, job_id)
            assert row["attempt"] == (0 if request == "snooze" else 1)
            assert row["run_at"] - row["now"] > timedelta(minutes=59)


def test_the_end_of_a_handlers_process_closes_no_descriptor_of_another(database: Database) -> None:
    """A number that is closed twice may belong to a database connection by then, and uvloop aborts the daemon."""
    app = rota.App("descriptors")
    closed: list[int] = []

    @app.middleware
    async def open_files_at_once(job: rota.Job[Any], call_next: Any) -> Any:
        result = await call_next(job)
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        for _ in range(20):
            await asyncio.sleep(0)
        for number in files:
            try:
                os.close(number)
            except OSError:
                closed.append(number)
        return result

    @app.handler("returns", runs_in="process")
    def returns(_: rota.SyncJob[Any]) -> None:
        raise AssertionError("the process runs the handler of the reference")

    async def run_one_job() -> str:
        async with database.connect() as conn, run_node(database.dsn, app, reference=REFERENCE):
            return await final_outcome(conn, await insert_job(conn, "returns", "[1]"), within=30)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run_one_job()) == "succeeded"
    assert closed == []


async def test_a_process_saves_checkpoints_and_progress_through_the_daemon(
    database: Database, conn: Connection[Record]
) -> None:
    """It has no connection of its own. A rejected value raises its error inside the handler."""
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "reports_progress")
        assert await final_outcome(conn, job_id, within=20) == "succeeded"
    (run,) = await ledger_rows(conn, job_id)
    assert json.loads(run["result"]) == {"done": 1}
    assert run["attempts"] == 2
    (attempt,) = await failed_attempts(conn, job_id)
    assert (attempt["error_kind"], "InvalidPayload" in attempt["error"]) == ("Retry", True)


async def test_a_timeout_ends_the_whole_process_group(
    database: Database, conn: Connection[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets SIGTERM, then SIGKILL after the grace, so that nothing runs beside the next attempt."""
    monkeypatch.setattr(python_module, "TERM_GRACE", 0.3)
    pids = tmp_path / "pids"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "family", json.dumps(str(pids)), timeout="interval '3 seconds'")
        await eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, what="the family")
        family = [int(pid) for pid in pids.read_text(encoding="ascii").split()]
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
        await eventually(lambda: not any(map(is_alive, family)), what="the family's end")

    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]


async def test_a_forked_child_does_not_hide_the_death_of_its_handler(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """It keeps the handler's pipe open. Without the kill of the group, the job would keep its slot forever."""
    pid = tmp_path / "pid"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "leaves a fork", json.dumps(str(pid)))
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
        await eventually(lambda: not is_alive(int(pid.read_text(encoding="ascii"))), what="the fork's end")
    assert "SIGKILL" in (await dead_letter(conn, job_id))["error"]


async def test_a_program_ended_by_a_timeout_does_not_make_the_attempt_succeed(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program got SIGTERM as well, the handler would return normally, and count as a success."""
    monkeypatch.setattr(python_module, "TERM_GRACE", 0.5)
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "runs_program", timeout="interval '3 seconds'")
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]


async def test_a_process_that_finishes_after_a_cancel_request_has_succeeded(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """SIGTERM sets `job.stop_requested`; a success wins over a cancel request."""
    pid = tmp_path / "pid"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "waits_for_stop", json.dumps(str(pid)))
        await eventually(pid.exists, what="the handler's start")
        await conn.execute("select rota.cancel($1)", job_id)
        assert await final_outcome(conn, job_id) == "succeeded"


async def test_a_killed_daemon_takes_the_processes_of_its_handlers_along(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """Otherwise the old attempt would run beside the next one."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "waits_for_stop", json.dumps(str(pid)))
        await eventually(lambda: pid.exists() and pid.read_text(), within=30, what="the handler's start")
        child = int(pid.read_text(encoding="ascii"))
        assert is_alive(child)
        daemon.kill()
        await eventually(lambda: not is_alive(child), what="the end of the handler's process")
        assert (await live_row(conn, job_id))["state"] == "running"


async def test_an_exit_in_a_handlers_background_task_makes_the_daemon_exit_with_1(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """With exit code 0, no supervisor would start it again."""
    with Daemons(tmp_path, database.dsn, app=REFERENCE) as daemons:
        daemon = daemons.launch()
        await insert_job(conn, "exits in a task")
        assert daemon.wait_for_exit() == 1


async def test_a_thread_that_does_not_stop_is_left_behind_and_its_job_is_due_when_the_lease_ends(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """Rule 12: the last write of the daemon releases the job for the time at which the lease would have ended."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE, environ={"ROTA_DRAIN_TIMEOUT": "500ms"}) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "ignores_stop", json.dumps(str(pid)), lease="interval '20 seconds'")
        await eventually(pid.exists, within=30, what="the handler's start")
        before = await live_row(conn, job_id)
        daemon.send(signal.SIGTERM)
        daemon.wait_for("handler.stuck")
        assert daemon.wait_for_exit() == HANDLER_LEFT_BEHIND
        released = await live_row(conn, job_id)
        assert (released["state"], released["attempt"], released["releases"]) == ("scheduled", 0, 1)
        assert released["run_at"] >= before["lease_expires_at"]
        assert released["run_at"] > released["now"]
        assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["interrupted"]
        assert await conn.fetchval("select count(*) from rota.nodes") == 0

    assert len(pid.read_text(encoding="ascii").splitlines()) == 1


async def test_a_dead_letter_written_at_the_end_of_a_drain_is_logged_as_an_error(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """An at-most-once job whose handler does not stop becomes a dead letter."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE, environ={"ROTA_DRAIN_TIMEOUT": "500ms"}) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "ignores_stop", json.dumps(str(pid)), delivery="'at_most_once'")
        await eventually(pid.exists, within=30, what="the handler's start")
        daemon.send(signal.SIGTERM)
        assert daemon.wait_for_exit() == HANDLER_LEFT_BEHIND
        assert (await dead_letter(conn, job_id))["reason"] == "lost"
        (event,) = daemon.events("job.settled", job_id=job_id)
        assert (event["level"], event["settlement"], event["reason"]) == ("error", "dead", "lost")


async def test_a_timed_out_job_is_not_retried_while_its_thread_still_runs(
    database: Database, conn: Connection[Record]
) -> None:
    """Rule 12: the thread keeps its slot until it ends."""
    app = rota.App("thread")
    go = threading.Event()
    running: list[int] = []
    concurrent: list[int] = []

    @app.handler("hang", timeout=timedelta(milliseconds=300), backoff_base=timedelta(milliseconds=1))
    def hang(job: rota.SyncJob[Any]) -> None:
        running.append(job.attempt)
        concurrent.append(len(running))
        if job.attempt == 1:
            go.wait(30)
        running.remove(job.attempt)
        if job.stop_requested:
            raise RuntimeError("stopped late")

    async with run_node(database.dsn, app, queues="default:1", lease__duration="30s") as node:
        job_id = await insert_job(conn, "hang")
        other = await insert_job(conn, "hang")
        await wait_for_claim(conn, job_id)
        await node.wait_for_event("handler.stuck", job_id=job_id, why="timeout")
        assert (await live_row(conn, other))["attempt"] == 0
        assert (await live_row(conn, job_id))["state"] == "running"
        assert await failed_attempts(conn, job_id) == []
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert await final_outcome(conn, other) == "succeeded"

    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]
    assert max(concurrent) == 1
