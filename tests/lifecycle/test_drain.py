"""Drain: a stopping daemon claims nothing, lets its jobs finish, then interrupts and releases the others."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import rota
from in_process_daemons import (
    failed_attempts,
    final_outcome,
    insert_job,
    live_row,
    run_node,
    wait_for_attempt_age,
    wait_for_claim,
)
from rota.runtime.clock import boottime
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


class GatedApp:
    """An app whose handler `wait` runs until `open` is set, and records why it was interrupted."""

    def __init__(self, **declared: Any) -> None:
        self.app = rota.App("gate")
        self.open = asyncio.Event()
        self.began: list[int] = []
        self.stopped: list[str | None] = []

        @self.app.handler("wait", **declared)
        async def wait(job: rota.Job[Any]) -> str:
            self.began.append(job.job_id)
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.stopped.append(job.stop_reason)
                raise
            return "done"


async def test_a_draining_daemon_claims_nothing_and_keeps_the_leases_of_running_jobs(
    database: Database, conn: Connection[Record]
) -> None:
    """After SIGTERM, running jobs finish and must not be taken for lost to other nodes."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app) as node:
        job_id = await insert_job(conn, "wait")
        lease = (await wait_for_claim(conn, job_id))["lease_expires_at"]
        os.kill(os.getpid(), signal.SIGTERM)
        await node.wait_for_event("node.stopping", how="drain")
        later = await insert_job(conn, "wait")

        async def has_advanced_twice() -> bool:
            return bool((await live_row(conn, job_id))["lease_expires_at"] > lease + (await _half_lease(conn, job_id)))

        await eventually(has_advanced_twice, what="the lease's advance during the drain")
        assert not node.stopped.is_set()
        gate.open.set()
        await node.wait_until_stopped()
        assert node.crash is None
        assert await final_outcome(conn, job_id) == "succeeded"
        assert (await live_row(conn, later))["state"] == "scheduled"
        assert gate.began == [job_id]
        assert gate.stopped == []

    assert not await conn.fetchval("select count(*) from rota.nodes")


async def test_a_success_during_the_drain_is_recorded_on_its_schedule(
    database: Database, conn: Connection[Record]
) -> None:
    """Otherwise a deployment during the nightly job would raise an alert for a missed run."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app) as node:
        await conn.execute("insert into rota.schedules (name, handler, cron) values ('nightly', 'wait', '0 0 1 1 *')")
        job_id = await conn.fetchval("select rota.run_schedule_now('nightly')")
        await wait_for_claim(conn, job_id)
        node.stop()
        await node.wait_for_event("node.stopping", how="drain")
        gate.open.set()
        await node.wait_until_stopped()

    assert await final_outcome(conn, job_id) == "succeeded"
    assert await conn.fetchval("select last_success_at is not null from rota.schedules")


async def test_liveness_accepts_a_full_dispatcher_and_ignores_a_draining_one(
    database: Database, conn: Connection[Record]
) -> None:
    """A red liveness probe in either case would kill the running jobs."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app, queues="default:1") as node:
        running = await insert_job(conn, "wait")
        await wait_for_claim(conn, running)
        full_since = boottime()

        def has_searched_since() -> bool:
            (dispatcher,) = (service for service in node.daemon.services() if service.name == "dispatcher")
            assert dispatcher.well
            return boottime() - dispatcher.age.total_seconds() > full_since + 1

        await eventually(has_searched_since, what="a turn of the dispatcher without a free slot")
        assert node.metric("rota_service_age_seconds", service="dispatcher") < boottime() - full_since

        node.stop()
        await node.wait_for_event("node.stopping", how="drain")
        assert "dispatcher" not in {service.name for service in node.daemon.services()}
        gate.open.set()
        await node.wait_until_stopped()


async def _half_lease(conn: Connection[Record], job_id: int) -> Any:
    return await conn.fetchval("select lease / 2 from rota.jobs where job_id = $1", job_id)


async def test_at_the_drain_deadline_jobs_are_interrupted_and_their_attempts_given_back(
    database: Database, conn: Connection[Record]
) -> None:
    """An interruption is not the job's failure: it uses no attempt, and the job is due again at once."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app, drain__timeout="500ms") as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        node.stop()
        await node.wait_until_stopped()
        assert node.crash is None
        assert [event["how"] for event in node.events_named("node.stopping")] == ["drain", "interrupt"]
    back = await live_row(conn, job_id)

    assert (back["state"], back["attempt"], back["releases"], back["losses"]) == ("scheduled", 0, 1, 0)
    assert back["run_at"] <= back["now"]
    assert back["leased_by"] is None
    assert [(a["outcome"], a["attempt"]) for a in await failed_attempts(conn, job_id)] == [("interrupted", 1)]
    assert gate.stopped == ["drain"]


async def test_a_second_stop_signal_interrupts_jobs_at_once(database: Database, conn: Connection[Record]) -> None:
    """An operator who sends the signal twice does not want to wait for the drain timeout."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app, drain__timeout="1h") as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        os.kill(os.getpid(), signal.SIGINT)
        await node.wait_for_event("node.stopping", how="drain")
        assert not node.stopped.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await node.wait_until_stopped(within=3)
        assert node.crash is None

    assert (await live_row(conn, job_id))["state"] == "scheduled"
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["interrupted"]


async def test_an_idle_daemon_stops_at_once(database: Database) -> None:
    """A deployment must not wait when there are no jobs to drain."""
    async with run_node(database.dsn, GatedApp().app, drain__timeout="1h") as node:
        node.stop()
        await node.wait_until_stopped(within=3)
        assert node.crash is None


async def test_an_interrupted_job_runs_again_on_the_next_daemon(database: Database, conn: Connection[Record]) -> None:
    """An interrupted job is due at once, so a rolling deployment does not wait for leases to expire."""
    gate = GatedApp()
    async with run_node(database.dsn, gate.app):
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
    async with run_node(database.dsn, gate.app):
        again = await wait_for_claim(conn, job_id)
        assert again["attempt"] == 1
        gate.open.set()
        assert await final_outcome(conn, job_id) == "succeeded"

    assert gate.began == [job_id, job_id]


async def test_a_handler_that_finishes_after_its_interruption_has_succeeded(
    database: Database, conn: Connection[Record]
) -> None:
    """It may use the grace to clean up and return a result."""
    app = rota.App("stubborn")
    started = asyncio.Event()

    @app.handler("finish")
    async def finish(job: rota.Job[Any]) -> str | None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return job.stop_reason
        return None

    async with run_node(database.dsn, app, drain__timeout="0s") as node:
        job_id = await insert_job(conn, "finish")
        await started.wait()
        node.stop()
        await node.wait_until_stopped()
        assert node.crash is None

    assert await final_outcome(conn, job_id) == "succeeded"
    assert await conn.fetchval("select result from rota.job_runs where job_id = $1", job_id) == '"drain"'


async def test_an_interruption_before_the_handler_is_called_uses_no_attempt(
    database: Database, conn: Connection[Record]
) -> None:
    """Only in this case may an at-most-once job be released: its handler has done nothing yet."""
    app = rota.App("once")
    called: list[int] = []
    blocked = asyncio.Event()

    @app.handler("block", queue="q")
    async def block(job: rota.Job[Any]) -> None:
        called.append(job.job_id)
        blocked.set()
        await asyncio.Event().wait()

    @app.handler("once", queue="q", delivery="at_most_once")
    async def once(job: rota.Job[Any]) -> None:
        called.append(job.job_id)

    async with run_node(database.dsn, app, queues="q:2") as node:
        blocking_job = await insert_job(conn, "block")
        await blocked.wait()
        # Interrupt the job in the loop turn that claims it, before its task has started.
        claimed = node.daemon.telemetry.jobs_claimed

        def interrupt_now(claims: Any) -> None:
            claimed(claims)
            running = node.daemon._loops.running  # type: ignore[union-attr]
            running.interrupt_all()

        node.daemon.telemetry.jobs_claimed = interrupt_now  # type: ignore[method-assign]
        job_id = await insert_job(conn, "once")
        await node.wait_for_event("job.settled", job_id=job_id, settlement="released", outcome="interrupted")
        node.daemon.telemetry.jobs_claimed = claimed  # type: ignore[method-assign]
        assert job_id not in called
        assert await final_outcome(conn, job_id) == "succeeded"
        assert blocking_job in called

    assert called.count(job_id) == 1


async def test_leases_of_a_long_drain_never_expire(database: Database, conn: Connection[Record]) -> None:
    """The heartbeat stops last: jobs must not be taken for lost in a drain longer than their lease."""
    gate = GatedApp()
    async with (
        run_node(database.dsn, gate.app, drain__timeout="1h") as node,
        run_node(database.dsn, rota.App("other")) as other,
    ):
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        node.stop()
        await wait_for_attempt_age(conn, 4.0, job_id=job_id)
        gate.open.set()
        await node.wait_until_stopped()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert not other.events_named("lease.reaped")
        assert not node.events_named("lease.reaped")

    assert gate.began == [job_id]
