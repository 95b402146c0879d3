"""The daemon as a whole: a bug of ours fells it, and nothing is left of it, however it ends."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import rota
from nodes import ended, history, insert, live_row, node, running_row
from rota.db import queries
from waiting import eventually

if TYPE_CHECKING:
    import pytest
    from asyncpg import Connection, Record

    from servers import Database

CYCLES = 50
"""On each of two loops."""


def waiting_app() -> rota.App:
    """A handler that waits on its first attempt, and returns on later ones."""
    app = rota.App("waiting")

    @app.handler("wait")
    async def wait(job: rota.Job[Any]) -> None:
        if job.attempt == 1:
            await asyncio.Event().wait()

    return app


async def test_a_bug_in_a_service_fells_the_daemon_and_its_jobs_are_taken_back(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody understands is not survived: run() raises, the platform restarts, leases bring the jobs back."""
    real = queries.sample_backlog

    async with node(database.dsn, waiting_app(), falls=True) as one:
        job_id = await insert(conn, "wait")
        await running_row(conn, job_id)

        async def buggy(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(queries, "look_for_ends", buggy)
        await one.ended()
        assert isinstance(one.fell, BaseExceptionGroup)
        assert one.fell.split(ZeroDivisionError)[0] is not None
        monkeypatch.undo()
    assert queries.sample_backlog is real
    left = await live_row(conn, job_id)
    assert (left["state"], left["attempt"]) == ("running", 1)
    async with node(database.dsn, waiting_app()):
        assert await ended(conn, job_id) == "succeeded"
        assert [a["outcome"] for a in await history(conn, job_id)] == ["lost"]


async def test_a_handler_that_will_not_be_cut_keeps_no_daemon_from_falling(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its services are gone: it would live on without a claim or a heartbeat, and the error that felled it be seen by nobody."""
    app, go = rota.App("stubborn"), asyncio.Event()
    left: list[int] = []

    @app.handler("stubborn")
    async def stubborn(_: rota.Job[Any]) -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    async def buggy(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    def leave(code: int) -> None:
        left.append(code)
        go.set()

    async with node(database.dsn, app, falls=True) as one:
        monkeypatch.setattr(os, "_exit", leave)
        await running_row(conn, await insert(conn, "stubborn"))
        monkeypatch.setattr(queries, "look_for_ends", buggy)
        await one.told("service.broke", service="reaper", kind="ZeroDivisionError")
        await one.ended()
    assert left == [1]


async def test_a_bug_on_the_heartbeats_thread_surfaces_in_the_daemon(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that died in silence would let all leases run out under running handlers."""

    async def buggy(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(queries, "extend_leases", buggy)
    async with node(database.dsn, waiting_app(), falls=True) as one:
        await insert(conn, "wait")
        await one.ended()
        assert isinstance(one.fell, BaseExceptionGroup)
        assert one.fell.split(ZeroDivisionError)[0] is not None
    await eventually(lambda: "heartbeat" not in {t.name for t in threading.enumerate()}, what="the end of the thread")


async def test_a_schedule_whose_record_is_refused_fells_no_daemon(database: Database, conn: Connection[Record]) -> None:
    """It costs dates and counts on schedules; the jobs run as well without."""
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

    async with node(database.dsn, app) as one:
        await one.told("service.failed", service="track record", kind="RaiseError", times=2)
        assert await ended(conn, await insert(conn, "done")) == "succeeded"
        assert one.fell is None


async def test_a_log_that_can_not_be_written_costs_its_lines_and_nothing_else(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a reader at the other end of the pipe who has gone: an error of the kind that a lost database has."""
    with monkeypatch.context() as full, io.FileIO("/dev/full", "w") as device:
        full.setattr(sys, "stderr", io.TextIOWrapper(device, write_through=True))
        async with node(database.dsn, waiting_app(), log__level="info") as one:
            job_id = await insert(conn, "wait", timeout="interval '1 second'", backoff_base="interval '1 millisecond'")
            assert await ended(conn, job_id) == "succeeded"
            await one.told("job.settled", job_id=job_id, settlement="retried")
            assert not one.seen("service.failed")


async def test_many_starts_and_stops_leave_nothing_behind(database: Database, conn: Connection[Record]) -> None:
    """No task, no thread, no connection, no row, no signal handler: with work done in each life, on a thread, too."""
    app = rota.App("short")

    @app.handler("loop")
    async def loop(job: rota.Job[Any]) -> None:
        async with job.transaction() as mine:
            await mine.execute("select 1")

    @app.handler("thread")
    def thread(job: rota.SyncJob[Any]) -> None:
        job.report_progress(1.0)

    async def others() -> list[str]:
        rows = await conn.fetch(
            "select application_name from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and application_name like 'rota %'"
        )
        return [each["application_name"] for each in rows]

    tasks, threads = len(asyncio.all_tasks()), 0
    for cycle in range(CYCLES):
        async with node(database.dsn, app) as one:
            jobs = [await insert(conn, "loop"), await insert(conn, "thread")]
            for job_id in jobs:
                assert await ended(conn, job_id) == "succeeded"
            one.stop()
            await one.ended()
        if cycle == 0:
            await eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("rota ")])
            threads = threading.active_count()
    assert len(asyncio.all_tasks()) == tasks
    await eventually(lambda: threading.active_count() <= threads, what="the end of all threads")

    async def gone() -> bool:
        return not await others()

    await eventually(gone, what="the end of all connections")
    assert await conn.fetchval("select count(*) from rota.nodes") == 0
    assert await conn.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0
    assert await conn.fetchval("select count(*) from rota.job_runs") == 2 * CYCLES


async def test_a_stop_at_any_moment_of_the_start_leaves_no_connection(
    database: Database, conn: Connection[Record]
) -> None:
    """An order that comes while connections are being opened ends as cleanly as any other, again and again."""
    for _ in range(15):
        async with node(database.dsn, waiting_app(), drain__timeout="1h") as one:
            one.stop()
            await one.ended(within=5)
            assert one.fell is None

    async def gone() -> bool:
        return not await conn.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'rota %'"
        )

    await eventually(gone, what="the end of all connections")


async def test_a_lifespan_is_entered_before_the_first_claim_and_left_after_the_drain(
    database: Database, conn: Connection[Record]
) -> None:
    """What handlers share is there before and after every one of them."""
    from contextlib import asynccontextmanager

    story: list[str] = []

    @asynccontextmanager
    async def lifespan() -> Any:
        story.append("entered")
        yield "state"
        story.append("left")

    app = rota.App("lives", lifespan=lifespan)
    go = asyncio.Event()

    @app.handler("tell")
    async def tell(job: rota.Job[Any]) -> None:
        story.append(str(job.state))
        await go.wait()
        story.append("done")

    job_id = await insert(conn, "tell")
    async with node(database.dsn, app) as one:
        await running_row(conn, job_id)
        one.stop()
        await one.told("node.stopping")
        go.set()
        await one.ended()
    assert story == ["entered", "state", "done", "left"]
