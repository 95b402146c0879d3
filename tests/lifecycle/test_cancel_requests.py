"""Requests to cancel a running job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import final_outcome, insert_job, job_row, ledger_rows, run_node, wait_for_claim
from network_faults import FaultyProxy, is_heartbeat, is_listener
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


@pytest.fixture
def waiting_app() -> rota.App:
    """An app with the handler `wait`, which runs until its task is cancelled."""
    app = rota.App("waiting")

    @app.handler("wait")
    async def wait(_: rota.Job[Any]) -> None:
        await asyncio.Event().wait()

    return app


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_running_job_is_cancelled_on_request(database: Database, conn: Connection[Record], kind: str) -> None:
    """The node is notified at once, and the ledger records who asked and why."""
    app = rota.App("cancel")
    reasons: list[str | None] = []

    @app.handler("async")
    async def wait(job: rota.Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(job.stop_reason)

    @app.handler("thread")
    def wait_in_a_thread(job: rota.SyncJob[Any]) -> None:
        while not job.wait_for_stop(timedelta(seconds=5)):
            pass
        reasons.append(job.stop_reason)
        raise RuntimeError("stopped")

    async with run_node(database.dsn, app, lease__duration="30s"):
        job_id = await insert_job(conn, kind)
        await wait_for_claim(conn, job_id)
        assert await conn.fetchval("select rota.cancel($1, note => 'wrong customer')", job_id) == "requested"
        assert await final_outcome(conn, job_id) == "cancelled"
    (run,) = await ledger_rows(conn, job_id)

    assert "wrong customer" in run["note"]
    assert reasons == ["cancel"]
    assert not await conn.fetchval("select count(*) from rota.cancel_requests")


async def test_a_cancel_request_that_arrives_before_the_claims_reply_is_obeyed(
    database: Database, conn: Connection[Record], waiting_app: rota.App
) -> None:
    """The row is already running, but the notified node does not know the job yet and has no lease to check."""
    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, waiting_app, lease__duration="3m") as node:
            await node.wait_for_event("listener.up")
            proxy.slow(lambda name: not is_listener(name) and not is_heartbeat(name), 1.0)
            job_id = await insert_job(conn, "wait")
            await wait_for_claim(conn, job_id)
            assert await conn.fetchval("select rota.cancel($1)", job_id) == "requested"
            assert not node.events_named("jobs.claimed")

            await node.wait_for_event("jobs.claimed")
            proxy.heal()
            assert await final_outcome(conn, job_id) == "cancelled"  # at once, not at the next heartbeat a minute later


@pytest.mark.parametrize("does", ["retry", "snooze", "bury", "interrupted", "succeed"])
async def test_a_cancel_request_wins_over_everything_but_success(
    database: Database, conn: Connection[Record], does: str
) -> None:
    """Rule 13: the settling statement itself checks for the request, because the heartbeat may not have seen it."""
    app = rota.App("wins")
    go = asyncio.Event()

    @app.handler("work")
    async def work(_: rota.Job[Any]) -> None:
        await go.wait()
        match does:
            case "retry":
                raise ValueError
            case "snooze":
                raise rota.Snooze(after=timedelta(0))
            case "bury":
                raise rota.Permanent
            case _:
                return

    async with run_node(database.dsn, app, lease__duration="60s") as node:
        job_id = await insert_job(conn, "work")
        await wait_for_claim(conn, job_id)
        # Insert without a notification, so that only the settlement can see the request.
        await conn.execute("insert into rota.cancel_requests (job_id, requested_by) values ($1, 'me')", job_id)
        if does == "interrupted":
            node.stop()
            node.stop()
        else:
            go.set()
        assert await final_outcome(conn, job_id) == ("succeeded" if does == "succeed" else "cancelled")

    async with run_node(database.dsn, app) as node:

        async def is_answered() -> bool:
            return not await conn.fetchval("select count(*) from rota.cancel_requests")

        await eventually(is_answered, what="the end of the request")

    assert len(await ledger_rows(conn, job_id)) == 1


async def test_a_forced_cancel_ends_the_job_at_once_and_makes_its_lease_lost(
    database: Database, conn: Connection[Record], waiting_app: rota.App
) -> None:
    """`force` writes the ledger without waiting for the node, whose token is stale afterwards."""
    async with run_node(database.dsn, waiting_app) as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        assert await conn.fetchval("select rota.cancel($1, force => true)", job_id) == "cancelled"
        await node.wait_for_event("lease.lost", job_id=job_id)
        assert await job_row(conn, job_id) is None
        assert [run["outcome"] for run in await ledger_rows(conn, job_id)] == ["cancelled"]
