"""Handlers in threads, which can't be cut, and in processes, which can be ended alone."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(threads_and_processes_app.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def alive(pid: int) -> bool:
    """Whether that process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_process_returns_raises_and_wishes_like_any_other_handler(
    database: Database, conn: Connection[Record]
) -> None:
    """The same words, the same settlements, in a process that isn't the daemon's."""
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE, queues="default:4") as node:
        jobs = {
            "plain": await insert_job(conn, "returns", '{"big": 123456789012345678901234567890}'),
            "async": await insert_job(conn, "returns async", "[1]"),
            "raised": await insert_job(conn, "raises", '{"secret": "s3cret-canary"}'),
            "segv": await insert_job(conn, "dies", '"segv"'),
            "realtime": await insert_job(conn, "dies", '"realtime"'),
            "exit": await insert_job(conn, "dies", '"exit"'),
            "cancelled": await insert_job(conn, "escapes", '"cancelled"'),
            "generator": await insert_job(conn, "escapes", '"generator"'),
            "interrupt": await insert_job(conn, "escapes", '"interrupt"'),
            "cancel": await insert_job(conn, "wishes", '"cancel"'),
            "permanent": await insert_job(conn, "wishes", '"permanent"'),
        }
        waiting = {wish: await insert_job(conn, "wishes", f'"{wish}"') for wish in ("snooze", "retry")}
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
        for wish, job_id in waiting.items():
            await node.wait_for_event("job.settled", job_id=job_id)
            waits = await live_row(conn, job_id)
            assert waits["attempt"] == (0 if wish == "snooze" else 1)
            assert waits["run_at"] - waits["now"] > timedelta(minutes=59)


async def test_a_process_saves_and_reports_through_the_daemon(database: Database, conn: Connection[Record]) -> None:
    """It has no connection of its own; what is refused is raised where it was asked for."""
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "relays")
        assert await final_outcome(conn, job_id, within=20) == "succeeded"
    (run,) = await ledger_rows(conn, job_id)
    assert json.loads(run["result"]) == {"done": 1}
    assert run["attempts"] == 2
    (tried,) = await failed_attempts(conn, job_id)
    assert (tried["error_kind"], "InvalidPayload" in tried["error"]) == ("Retry", True)


async def test_a_timeout_ends_the_whole_family(
    database: Database, conn: Connection[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM, a grace, KILL, to the group: nothing of an attempt goes on beside the next one."""
    monkeypatch.setattr(python_module, "TERM_GRACE", 0.3)
    pids = tmp_path / "pids"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "family", json.dumps(str(pids)), timeout="interval '3 seconds'")
        await eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, what="the family")
        family = [int(pid) for pid in pids.read_text(encoding="ascii").split()]
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
        await eventually(lambda: not any(map(alive, family)), what="the family's end")
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]


async def test_the_forks_of_a_handler_that_was_killed_hide_its_end_from_nobody(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """They hold its pipe open; without their end the job would never come to its own, and keep its slot for good."""
    pid = tmp_path / "pid"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "leaves a fork", json.dumps(str(pid)))
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
        await eventually(lambda: not alive(int(pid.read_text(encoding="ascii"))), what="the fork's end")
    assert "SIGKILL" in (await dead_letter(conn, job_id))["error"]


async def test_a_program_that_we_end_is_not_taken_for_work_that_is_done(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler waits for a program and returns. Were the program told to stop, too, it would return, and count as done."""
    monkeypatch.setattr(python_module, "TERM_GRACE", 0.5)
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "shells", timeout="interval '3 seconds'")
        assert await final_outcome(conn, job_id, within=15) == "dead: exhausted"
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]


async def test_a_process_is_told_of_a_cancel_and_may_finish(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """SIGTERM is `job.stop_requested`; that it returned all the same is a success, which alone wins over a cancel."""
    pid = tmp_path / "pid"
    async with run_node(database.dsn, threads_and_processes_app.app, reference=REFERENCE):
        job_id = await insert_job(conn, "heeds", json.dumps(str(pid)))
        await eventually(pid.exists, what="the handler's start")
        await conn.execute("select rota.cancel($1)", job_id)
        assert await final_outcome(conn, job_id) == "succeeded"


async def test_a_daemon_killed_takes_its_handlers_processes_along(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """Otherwise the old attempt would go on beside the next one, with nobody to tell it."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "heeds", json.dumps(str(pid)))
        await eventually(lambda: pid.exists() and pid.read_text(), within=30, what="the handler's start")
        child = int(pid.read_text(encoding="ascii"))
        assert alive(child)
        daemon.kill()
        await eventually(lambda: not alive(child), what="the end of the handler's process")
        assert (await live_row(conn, job_id))["state"] == "running"


async def test_an_exit_in_a_task_of_a_handlers_own_does_not_pass_for_a_stop(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """It ends the loop and the daemon with it: with exit code 0 nobody would start another one."""
    with Daemons(tmp_path, database.dsn, app=REFERENCE) as daemons:
        daemon = daemons.launch()
        await insert_job(conn, "exits in a task")
        assert daemon.ends() == 1


async def test_a_thread_that_will_not_stop_is_released_for_when_its_lease_ends_and_the_process_goes(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """Rule 12: nothing is settled while it runs; the last write makes the job due when the lease would have ended."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE, environ={"ROTA_DRAIN_TIMEOUT": "500ms"}) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "deaf", json.dumps(str(pid)), lease="interval '20 seconds'")
        await eventually(pid.exists, within=30, what="the handler's start")
        before = await live_row(conn, job_id)
        daemon.send(signal.SIGTERM)
        daemon.wait_for("handler.stuck")
        assert daemon.ends() == HANDLER_LEFT_BEHIND
        released = await live_row(conn, job_id)
        assert (released["state"], released["attempt"], released["releases"]) == ("scheduled", 0, 1)
        assert released["run_at"] >= before["lease_expires_at"]
        assert released["run_at"] > released["now"]
        assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["interrupted"]
        assert await conn.fetchval("select count(*) from rota.nodes") == 0
    assert len(pid.read_text(encoding="ascii").splitlines()) == 1


async def test_what_a_draining_daemon_buries_last_is_told_of_like_any_dead_letter(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """At most once, and its handler never stopped: a dead letter, which nobody would hear of but for the log."""
    pid = tmp_path / "pid"
    with Daemons(tmp_path, database.dsn, app=REFERENCE, environ={"ROTA_DRAIN_TIMEOUT": "500ms"}) as daemons:
        daemon = daemons.launch()
        job_id = await insert_job(conn, "deaf", json.dumps(str(pid)), delivery="'at_most_once'")
        await eventually(pid.exists, within=30, what="the handler's start")
        daemon.send(signal.SIGTERM)
        assert daemon.ends() == HANDLER_LEFT_BEHIND
        assert (await dead_letter(conn, job_id))["reason"] == "lost"
        (told,) = daemon.events("job.settled", job_id=job_id)
        assert (told["level"], told["settlement"], told["reason"]) == ("error", "dead", "lost")


async def test_a_thread_keeps_its_slot_until_it_ends(database: Database, conn: Connection[Record]) -> None:
    """Rule 12: a job that timed out is not tried again beside the thread that still runs it."""
    app = rota.App("thread")
    go = threading.Event()
    running: list[int] = []
    most: list[int] = []

    @app.handler("hang", timeout=timedelta(milliseconds=300), backoff_base=timedelta(milliseconds=1))
    def hang(job: rota.SyncJob[Any]) -> None:
        running.append(job.attempt)
        most.append(len(running))
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
    assert max(most) == 1
