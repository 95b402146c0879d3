"""Supervision: crashed loops are restarted, and a daemon leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import failed_attempts, final_outcome, gated_app, insert_job, run_node, wait_for_claim
from rota.db import queries, schedule_queries
from rota.errors import DaemonFailed
from rota.services import gauges, presence
from rota.supervision import supervisor
from rota.supervision.tasks import ProtectedTask
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

CYCLES = 25
"""Starts and stops, for each of the two event loops."""


def waiting_app() -> rota.App:
    """An app whose handler waits on its first attempt and returns on later ones."""
    app = rota.App("waiting")

    @app.handler("wait")
    async def wait(job: rota.Job[Any]) -> None:
        if job.attempt == 1:
            await asyncio.Event().wait()

    return app


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pause after a crash, so that ten crashes take less than a second."""
    monkeypatch.setattr(supervisor, "backoff_pause", lambda _: 0.01)


FUNCTION_OF_LOOP = {
    "dispatcher": (queries, "claim_due_jobs"),
    "settle": (queries, "settle_succeeded"),
    "reaper": (queries, "find_reaper_work"),
    "scheduler": (schedule_queries, "take_due_schedules"),
    "heartbeat": (queries, "extend_leases"),
    "presence": (queries, "register_node"),
    "gauges": (queries, "sample_backlog"),
}
"""Loop -> (module, function that the loop calls in each turn)."""


@pytest.mark.usefixtures("quick_restarts")
@pytest.mark.parametrize("loop", FUNCTION_OF_LOOP)
async def test_a_loop_that_crashes_is_counted_and_restarted_while_jobs_continue(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """An unexpected exception costs one turn of one loop, and outcomes already collected are still written."""
    go, calls = asyncio.Event(), list[int]()
    monkeypatch.setattr(gauges, "SAMPLE_INTERVAL", timedelta(milliseconds=100))
    monkeypatch.setattr(gauges.Gauges, "interval", timedelta(milliseconds=100))
    monkeypatch.setattr(presence.Presence, "interval", timedelta(milliseconds=100))

    async with run_node(database.dsn, gated_app(go, calls)) as node:
        first = await insert_job(conn, "wait")
        await wait_for_claim(conn, first)
        module, name = FUNCTION_OF_LOOP[loop]
        real, failures_left = getattr(module, name), 3
        crashes = 1 if loop == "settle" else 3

        async def buggy(*arguments: Any, **keywords: Any) -> Any:
            nonlocal failures_left
            if failures_left:
                failures_left -= 1
                raise NotImplementedError
            return await real(*arguments, **keywords)

        monkeypatch.setattr(module, name, buggy)
        second = await insert_job(conn, "wait")
        if loop == "settle":  # it fails for the batch and for each of its two outcomes, and crashes once
            await eventually(lambda: len(calls) == 2, what="the second call")
            go.set()
        await node.wait_for_event("loop.crashed", loop=loop, kind="NotImplementedError", times=crashes)
        go.set()
        assert [await final_outcome(conn, job_id) for job_id in (first, second)] == ["succeeded"] * 2
        assert node.metric("rota_loop_crashes_total", loop=loop) == len(node.events_named("loop.crashed"))
        assert "buggy" in str(node.events_named("loop.crashed")[0]["traceback"])
        assert await final_outcome(conn, await insert_job(conn, "wait")) == "succeeded"
        assert not await failed_attempts(conn, first)

    assert node.crash is None


@pytest.mark.usefixtures("quick_restarts")
async def test_a_loop_that_keeps_crashing_makes_the_daemon_drain_and_exit(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten crashes without a success, running jobs still finish before the platform restarts the daemon."""
    go, calls = asyncio.Event(), list[int]()

    async def buggy(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async with run_node(database.dsn, gated_app(go, calls), may_crash=True) as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        monkeypatch.setattr(queries, "find_reaper_work", buggy)
        await node.wait_for_event("loop.given_up", loop="reaper", kind="NotImplementedError")
        await node.wait_for_event("node.stopping", how="drain")
        go.set()
        await node.wait_until_stopped()
        assert isinstance(node.crash, DaemonFailed)
        assert "'reaper' crashed 10 times in a row" in str(node.crash)

    assert await final_outcome(conn, job_id) == "succeeded"


@pytest.mark.usefixtures("quick_restarts")
async def test_a_settlement_that_crashes_affects_only_its_own_job(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other outcomes are still written, and the daemon keeps running."""
    real, go, calls = queries.settle_succeeded, asyncio.Event(), list[int]()
    bad: list[int] = []

    async def buggy(db: Any, *, attempts: Any, **keywords: Any) -> Any:
        if any(job_id in bad for job_id, _ in attempts):
            raise NotImplementedError
        return await real(db, attempts=attempts, **keywords)

    monkeypatch.setattr(queries, "settle_succeeded", buggy)

    async with run_node(database.dsn, gated_app(go, calls)) as node:
        jobs = [await insert_job(conn, "wait") for _ in range(4)]
        bad.append(jobs[0])
        await eventually(lambda: len(calls) == 4)
        go.set()
        assert [await final_outcome(conn, job_id) for job_id in jobs[1:]] == ["succeeded"] * 3
        await node.wait_for_event("settlement.rejected", job_id=jobs[0], kind="NotImplementedError")
        assert await final_outcome(conn, jobs[0]) == "dead: permanent"


@pytest.mark.usefixtures("quick_restarts")
async def test_loops_cancelled_from_outside_any_job_are_restarted(database: Database, conn: Connection[Record]) -> None:
    """A cancelled main task makes the daemon drain."""
    go, calls = asyncio.Event(), list[int]()
    async with run_node(database.dsn, gated_app(go, calls), may_crash=True) as node:
        first = await insert_job(conn, "wait")
        await wait_for_claim(conn, first)
        for task in asyncio.all_tasks():
            if isinstance(task, ProtectedTask) and not task.get_name().startswith("Task-"):
                task.cancel()
        for loop in ("settle", "heartbeat", "trust", "scheduler", "reaper", "presence", "dispatcher", "listener"):
            await node.wait_for_event("loop.crashed", loop=loop, kind="CancelledError")
        (main,) = [task for task in asyncio.all_tasks() if task.get_name() == "daemon under test"]
        main.cancel()
        await node.wait_for_event("node.stopping", how="drain")
        go.set()
        await node.wait_until_stopped()
        assert isinstance(node.crash, DaemonFailed)

    assert await final_outcome(conn, first) == "succeeded"


async def test_a_schedule_that_rejects_its_statistics_crashes_no_daemon(
    database: Database, conn: Connection[Record]
) -> None:
    """Only dates and counts of schedules are lost; jobs run without them."""
    await conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before update on rota.schedule_clocks for each row
        when (new.last_success_at is distinct from old.last_success_at) execute function refuse();
        insert into rota.schedules (name, handler, every) values ('s', 'done', '1 second');
        """
    )
    app = rota.App("scheduled")

    @app.handler("done")
    async def done(_: rota.Job[Any]) -> None:
        return

    async with run_node(database.dsn, app) as node:
        await node.wait_for_event("row.refused", doing="track record", kind="RaiseError", times=2)
        assert await final_outcome(conn, await insert_job(conn, "done")) == "succeeded"
        assert node.crash is None


async def test_a_failing_log_output_loses_only_its_lines(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a closed pipe raises the same kind of error as a lost database connection."""
    with monkeypatch.context() as full, io.FileIO("/dev/full", "w") as device:
        full.setattr(sys, "stderr", io.TextIOWrapper(device, write_through=True))
        async with run_node(database.dsn, waiting_app(), log__level="info") as node:
            job_id = await insert_job(
                conn, "wait", timeout="interval '1 second'", backoff_base="interval '1 millisecond'"
            )
            assert await final_outcome(conn, job_id) == "succeeded"
            await node.wait_for_event("job.settled", job_id=job_id, settlement="retried")
            assert not node.events_named("service.failed")


async def test_many_starts_and_stops_leave_nothing_behind(database: Database, conn: Connection[Record]) -> None:
    """No task, thread, connection, row or lock is left, although jobs ran on the loop and on a thread."""
    app = rota.App("short")

    @app.handler("loop")
    async def loop(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("select 1")

    @app.handler("thread")
    def thread(job: rota.SyncJob[Any]) -> None:
        job.report_progress(1.0)

    async def list_rota_connections() -> list[str]:
        rows = await conn.fetch(
            "select application_name from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and application_name like 'rota %'"
        )
        return [each["application_name"] for each in rows]

    tasks, threads = len(asyncio.all_tasks()), 0
    for cycle in range(CYCLES):
        async with run_node(database.dsn, app) as node:
            jobs = [await insert_job(conn, "loop"), await insert_job(conn, "thread")]
            for job_id in jobs:
                assert await final_outcome(conn, job_id) == "succeeded"
            node.stop()
            await node.wait_until_stopped()
        if cycle == 0:
            await eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("rota ")])
            threads = threading.active_count()
    assert len(asyncio.all_tasks()) == tasks

    await eventually(lambda: threading.active_count() <= threads, what="the end of all threads")

    async def are_closed() -> bool:
        return not await list_rota_connections()

    await eventually(are_closed, what="the end of all connections")
    assert await conn.fetchval("select count(*) from rota.nodes") == 0
    assert await conn.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0
    assert await conn.fetchval("select count(*) from rota.job_runs") == 2 * CYCLES


async def test_a_stop_at_any_moment_of_the_start_leaves_no_connection(
    database: Database, conn: Connection[Record]
) -> None:
    for _ in range(15):
        async with run_node(database.dsn, waiting_app(), drain__timeout="1h") as node:
            node.stop()
            await node.wait_until_stopped(within=5)
            assert node.crash is None

    async def are_closed() -> bool:
        return not await conn.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'rota %'"
        )

    await eventually(are_closed, what="the end of all connections")


async def test_a_lifespan_is_entered_before_the_first_claim_and_left_after_the_drain(
    database: Database, conn: Connection[Record]
) -> None:
    from contextlib import asynccontextmanager

    log: list[str] = []

    @asynccontextmanager
    async def lifespan() -> Any:
        log.append("entered")
        yield "state"
        log.append("left")

    app = rota.App("lives", lifespan=lifespan)
    go = asyncio.Event()

    @app.handler("tell")
    async def use_state(job: rota.Job[Any]) -> None:
        log.append(str(job.state))
        await go.wait()
        log.append("done")

    job_id = await insert_job(conn, "tell")

    async with run_node(database.dsn, app) as node:
        await wait_for_claim(conn, job_id)
        node.stop()
        await node.wait_for_event("node.stopping")
        go.set()
        await node.wait_until_stopped()

    assert log == ["entered", "state", "done", "left"]
