"""Lost replies: the server has committed, but the node got no answer. The node finds out what happened."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import (
    failed_attempts,
    final_outcome,
    insert_job,
    ledger_rows,
    live_row,
    run_node,
)
from network_faults import FaultyProxy
from reply_loss import lossy_proxy
from rota.handlers import database_port

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


def replies_app(calls: list[int], effects: Database | None = None) -> rota.App:
    """An app with handlers that succeed, fail, and commit."""
    app = rota.App("replies")

    @app.handler("succeed")
    async def succeed(job: rota.Job[Any]) -> str:
        calls.append(job.attempt)
        return "done"

    @app.handler("fail", backoff_base=timedelta(hours=1))
    async def fail(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        raise ValueError

    @app.handler("permanent")
    async def permanent(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        raise rota.Permanent

    @app.handler("commit")
    async def commit(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        async with job.transaction() as own_conn:
            await own_conn.execute("insert into public.effects values ($1)", job.attempt)

    @app.handler("step", backoff_base=timedelta(milliseconds=1), backoff_cap=timedelta(milliseconds=1))
    async def step(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        if job.checkpoint is None:
            async with job.transaction(checkpoint={"done": 1}) as own_conn:
                await own_conn.execute("insert into public.effects values ($1)", job.attempt)

    del effects
    return app


async def test_b83_a_settlement_whose_reply_was_lost_counts_once_as_success(
    database: Database, conn: Connection[Record]
) -> None:
    """The row was settled by the same fence token, so this is no stale write, and nothing runs again."""
    calls: list[int] = []
    async with lossy_proxy(database.dsn) as proxy, run_node(proxy.dsn, replies_app(calls)) as node:
        proxy.lose_replies_to("Move jobs whose attempts succeeded")
        job_id = await insert_job(conn, "succeed")
        await node.wait_for_event("service.failed", service="settle")
        await node.wait_for_event("job.settled", job_id=job_id, settlement="succeeded")
        assert proxy.lost_replies == 1
        assert len(await ledger_rows(conn, job_id)) == 1
        assert node.metric("rota_settled_total", queue="default", handler="succeed", settlement="succeeded") == 1
        assert node.metric("rota_stale_writes_total") == node.metric("rota_leases_lost_total") == 0

    assert calls == [1]


@pytest.mark.parametrize(("handler", "settled_as"), [("fail", "retried"), ("permanent", "dead: permanent")])
async def test_a_failure_whose_settlement_reply_was_lost_is_not_counted_as_a_success(
    database: Database, conn: Connection[Record], handler: str, settled_as: str
) -> None:
    calls: list[int] = []
    async with lossy_proxy(database.dsn) as proxy, run_node(proxy.dsn, replies_app(calls)) as node:
        proxy.lose_replies_to("Settle attempts that did not succeed")
        job_id = await insert_job(conn, handler)
        await node.wait_for_event("settlement.confirmed", job_id=job_id)
        assert node.metric("rota_settled_total", queue="default", handler=handler, settlement="succeeded") == 0
        assert node.metric("rota_stale_writes_total") == 0
        if settled_as == "retried":
            row = await live_row(conn, job_id)
            assert (row["state"], row["attempt"]) == ("scheduled", 1)
        else:
            assert await final_outcome(conn, job_id) == settled_as
        assert len(await failed_attempts(conn, job_id)) == 1

    assert calls == [1]


async def test_claims_whose_reply_was_lost_are_released_by_the_next_claim(
    database: Database, conn: Connection[Record]
) -> None:
    """Otherwise they would wait until their leases end. The release gives the attempt back."""
    calls: list[int] = []
    async with (
        lossy_proxy(database.dsn) as proxy,
        run_node(proxy.dsn, replies_app(calls), lease__duration="60s") as node,
    ):
        await node.wait_for_event("listener.up")
        await final_outcome(conn, await insert_job(conn, "succeed"))
        calls.clear()
        # The trigger is a claim that returns jobs: an empty one of an idle node must not use up the lost replies.
        async with conn.transaction():
            jobs = [await insert_job(conn, "succeed", run_at="now() + interval '50 milliseconds'") for _ in range(5)]
            proxy.lose_replies_to("Claim due jobs for one node", times=3)
        for job_id in jobs:
            assert await final_outcome(conn, job_id) == "succeeded"
        assert proxy.lost_replies >= 1
        assert sum(event["count"] for event in node.events_named("claims.orphaned")) <= 15
        for job_id in jobs:
            (run,) = await ledger_rows(conn, job_id)
            assert run["attempts"] == 1

    assert calls == [1] * 5


async def test_a_commit_whose_reply_was_lost_is_looked_up_in_the_ledger(
    database: Database, conn: Connection[Record]
) -> None:
    calls: list[int] = []
    await conn.execute("create table public.effects (attempt int)")
    async with lossy_proxy(database.dsn) as proxy, run_node(proxy.dsn, replies_app(calls)) as node:
        proxy.lose_replies_to("COMMIT;")
        job_id = await insert_job(conn, "commit")
        await node.wait_for_event("job.settled", job_id=job_id, settlement="succeeded")
        assert proxy.lost_replies == 1
        assert node.metric("rota_settled_total", queue="default", handler="commit", settlement="succeeded") == 1
        assert node.metric("rota_leases_lost_total") == 0

    assert calls == [1]
    assert len(await ledger_rows(conn, job_id)) == 1
    assert await conn.fetchval("select count(*) from public.effects") == 1


async def test_a_commit_without_any_reply_does_not_keep_its_slot(database: Database, conn: Connection[Record]) -> None:
    """Over a cut link the driver alone would wait for a quarter of an hour."""
    calls: list[int] = []
    await conn.execute("create table public.effects (attempt int)")
    async with lossy_proxy(database.dsn) as proxy, run_node(proxy.dsn, replies_app(calls), queues="default:1") as node:
        proxy.lose_replies_to("COMMIT;", silent=True)
        job_id = await insert_job(conn, "commit")
        await node.wait_for_event("job.settled", job_id=job_id, settlement="succeeded")
        assert proxy.lost_replies == 1
        again = await insert_job(conn, "commit")
        await node.wait_for_event("job.settled", job_id=again, settlement="succeeded")
        assert node.metric("rota_leases_lost_total") == 0

    assert calls == [1, 1]
    assert await conn.fetchval("select count(*) from public.effects") == 2


async def test_a_step_whose_commit_reply_was_lost_is_not_repeated_by_the_next_attempt(
    database: Database, conn: Connection[Record]
) -> None:
    """The attempt fails, and the next one finds the checkpoint."""
    calls: list[int] = []
    await conn.execute("create table public.effects (attempt int)")
    async with lossy_proxy(database.dsn) as proxy, run_node(proxy.dsn, replies_app(calls)):
        proxy.lose_replies_to("COMMIT;")
        job_id = await insert_job(conn, "step")
        assert await final_outcome(conn, job_id) == "succeeded"
        assert proxy.lost_replies == 1

    assert calls == [1, 2]
    assert await conn.fetchval("select array_agg(attempt) from public.effects") == [1]


async def test_a_transaction_commits_effect_and_completion_together_or_neither(
    database: Database, conn: Connection[Record]
) -> None:
    """An error that a handler raises after its commit cannot undo it."""
    app = rota.App("transactions")
    await conn.execute("create table public.effects (n int)")

    @app.handler("fails", max_attempts=1)
    async def fails(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("insert into public.effects values (1)")
            raise ValueError

    @app.handler("fails after")
    async def fails_after(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("insert into public.effects values (2)")
        raise ValueError

    @app.handler("twice", max_attempts=1)
    async def twice(job: rota.Job[Any]) -> None:
        async with job.transaction(checkpoint=1) as own_conn:
            await own_conn.execute("insert into public.effects values (3)")
        async with job.transaction(checkpoint=2) as own_conn:
            await own_conn.execute("insert into public.effects values (4)")
        async with job.transaction() as own_conn:
            await own_conn.execute("insert into public.effects values (5)")

    @app.handler("completes and rolls back", max_attempts=1)
    async def completes_and_rolls_back(job: rota.Job[Any]) -> None:
        async with database.connect() as own_conn:
            transaction = own_conn.transaction()
            await transaction.start()
            await job.complete(own_conn, {"n": 1})
            await transaction.rollback()

    @app.handler("completes")
    async def completes(job: rota.Job[Any]) -> None:
        async with database.connect() as own_conn, own_conn.transaction():
            await own_conn.execute("insert into public.effects values (6)")
            await job.complete(own_conn, {"n": 1})

    async with run_node(database.dsn, app) as node:
        jobs = {
            name: await insert_job(conn, name)
            for name in ("fails", "fails after", "twice", "completes and rolls back", "completes")
        }
        ends = {name: await final_outcome(conn, job_id) for name, job_id in jobs.items()}
        assert ends == {
            "fails": "dead: exhausted",
            "fails after": "succeeded",
            "twice": "succeeded",
            "completes and rolls back": "dead: exhausted",
            "completes": "succeeded",
        }
        await node.wait_for_event("job.settled", job_id=jobs["completes"], settlement="succeeded")
        assert node.metric("rota_settled_total", queue="default", handler="completes", settlement="succeeded") == 1
    assert [r["n"] for r in await conn.fetch("select n from public.effects order by 1")] == [2, 3, 4, 5, 6]

    (run,) = await ledger_rows(conn, jobs["completes"])
    assert run["result"] == '{"n": 1}'


async def test_a_transaction_that_takes_longer_than_a_lease_keeps_its_lease(
    database: Database, conn: Connection[Record]
) -> None:
    """It locks the job's row only when it completes the job, so heartbeats extend the lease until then."""
    app = rota.App("long")

    @app.handler("long")
    async def long(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("select pg_sleep(3.5)")

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "long")
        assert await final_outcome(conn, job_id) == "succeeded"
        assert not node.events_named("lease.lost")
    assert await failed_attempts(conn, job_id) == []


async def test_a_rollback_without_any_reply_does_not_keep_its_slot(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a cut link the driver alone would wait for a quarter of an hour."""
    monkeypatch.setattr(database_port, "STATEMENT_SECONDS", 0.5)
    app, has_begun = rota.App("cut off"), asyncio.Event()

    @app.handler("writes", max_attempts=1)
    async def writes(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("select 1")
            has_begun.set()
            await own_conn.execute("select pg_sleep(60)")

    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, app, drain__grace="30s"):
            job_id = await insert_job(conn, "writes", timeout="interval '1 second'")
            await has_begun.wait()
            proxy.freeze(lambda name: name.endswith("handlers"))
            assert await final_outcome(conn, job_id) == "dead: exhausted"
            proxy.heal()

    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]
