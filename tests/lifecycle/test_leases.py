"""Leases: how a node keeps them, how it loses them, and that a lost lease makes every write fail."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import (
    STEAL_JOB,
    failed_attempts,
    final_outcome,
    insert_job,
    ledger_rows,
    live_row,
    run_node,
    wait_for_attempt_age,
    wait_for_claim,
)
from network_faults import FaultyProxy
from rota.db import queries
from waiting import eventually, until

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


async def test_a_lost_lease_cancels_the_handler_and_rejects_its_writes(
    database: Database, conn: Connection[Record]
) -> None:
    """Checkpoint, progress, completion and transaction all raise StaleToken; the new claim stays unchanged."""
    app = rota.App("zombie")
    stale_errors: dict[str, str] = {}
    stop_reasons: list[str | None] = []
    stolen = asyncio.Event()
    await conn.execute("create table public.effects (n int)")

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        await stolen.wait()

        async def complete_in_mine() -> None:
            async with database.connect() as mine, mine.transaction():
                await mine.execute("insert into public.effects values (2)")
                await job.complete(mine, {"zombie": True})

        async def transact() -> None:
            async with job.transaction() as mine:
                await mine.execute("insert into public.effects values (1)")

        async def step() -> None:
            async with job.transaction(checkpoint={"zombie": True}) as mine:
                await mine.execute("insert into public.effects values (3)")

        for name, write in {
            "checkpoint": lambda: job.save_checkpoint({"zombie": True}),
            "progress": lambda: job.report_progress(0.9),
            "complete": complete_in_mine,
            "transaction": transact,
            "step": step,
        }.items():
            try:
                await write()
            except rota.StaleToken as error:
                stale_errors[name] = str(error)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stop_reasons.append(job.stop_reason)
            raise

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "work")
        mine = await wait_for_claim(conn, job_id)
        token = await conn.fetchval(STEAL_JOB, job_id)
        before = await live_row(conn, job_id)
        stolen.set()
        await node.wait_for_event("lease.lost", job_id=job_id)
        assert stale_errors.keys() == {"checkpoint", "progress", "complete", "transaction", "step"}
        assert all(str(mine["fence_token"]) in text for text in stale_errors.values())
        assert stop_reasons == ["lease_lost"]
        assert token > mine["fence_token"]
        assert node.metric("rota_leases_lost_total") == 1
        assert node.metric("rota_stale_writes_total") == 5

        after = await live_row(conn, job_id)
        assert {**after, "now": 0} == {**before, "now": 0}
        assert await ledger_rows(conn, job_id) == []
        assert await failed_attempts(conn, job_id) == []
        assert await conn.fetchval("select count(*) from public.effects") == 0


async def test_a_thread_that_lost_its_lease_is_counted_and_its_result_is_rejected(
    database: Database, conn: Connection[Record]
) -> None:
    """A thread cannot be cancelled: the job reports the loss to it, and the database rejects its settlement."""
    import threading

    app = rota.App("thread")
    go = threading.Event()

    @app.handler("work")
    def work(job: rota.SyncJob[Any]) -> str | None:
        assert job.wait_for_stop(timedelta(seconds=10))
        go.wait(10)
        return job.stop_reason

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "work")
        await wait_for_claim(conn, job_id)
        await conn.execute(STEAL_JOB, job_id)
        before = await live_row(conn, job_id)
        await node.wait_for_event("lease.missed", job_id=job_id)
        go.set()
        await node.wait_for_event("write.refused", job_id=job_id, what="settlement")

        assert node.metric("rota_leases_lost_total") == 1
        assert {**(await live_row(conn, job_id)), "now": 0} == {**before, "now": 0}
        assert await ledger_rows(conn, job_id) == []


async def test_a_handler_that_blocks_the_loop_for_longer_than_a_lease_keeps_its_lease(
    database: Database, conn: Connection[Record]
) -> None:
    """The heartbeat has its own thread, so a blocked event loop delays jobs but starts none twice."""
    app = rota.App("blocker")
    tries: list[int] = []

    @app.handler("block")
    async def block(job: rota.Job[Any]) -> None:
        tries.append(job.attempt)
        blocked_until = time.monotonic() + 4.5
        until(lambda: time.monotonic() > blocked_until)

    async with run_node(database.dsn, app, queues="default:2") as node:
        job_id = await insert_job(conn, "block")
        assert await final_outcome(conn, job_id) == "succeeded"
        assert tries == [1]
        assert not node.events_named("lease.lost")
        assert not node.events_named("lease.reaped")
        assert await failed_attempts(conn, job_id) == []
        await node.wait_for_turns("trust", times=4)
        assert node.metric("rota_loop_lag_seconds") > 4, "the gauge keeps the worst lag for a later scrape"


async def test_a_heartbeat_extends_no_lease_past_the_jobs_timeout(database: Database, conn: Connection[Record]) -> None:
    """A stuck handler must not keep its job for ever: the lease ends at timeout plus grace plus one second.

    The attempt is recorded as timed out with an abandoned thread, and not as a loss.
    """
    import threading

    app = rota.App("wedged")
    go = threading.Event()
    tries: list[int] = []

    @app.handler("wedge", timeout=timedelta(seconds=2), backoff_base=timedelta(milliseconds=1))
    def wedge(job: rota.SyncJob[Any]) -> str | None:
        tries.append(job.attempt)
        if job.attempt == 1:
            go.wait(30)
        return job.stop_reason

    other = rota.App("other")

    async with run_node(database.dsn, app, queues="default:1") as node, run_node(database.dsn, other) as other_node:
        job_id = await insert_job(conn, "wedge")
        claimed = await wait_for_claim(conn, job_id)
        await wait_for_attempt_age(conn, 2.2, job_id=job_id)
        last = await live_row(conn, job_id)
        assert last["lease_expires_at"] <= claimed["started_at"] + timedelta(seconds=4.1)

        await node.wait_for_event("handler.stuck", job_id=job_id, why="timeout")

        await node.wait_for_event("job.settled", job_id=job_id, settlement="retried", outcome="timed_out")
        # Rule 12: the thread keeps its slot until it ends, so no second attempt runs beside it.
        await node.wait_for_turns("reaper", 3)
        assert tries == [1]

        (abandoned,) = await failed_attempts(conn, job_id)
        assert (abandoned["outcome"], abandoned["error_kind"]) == ("timed_out", "Timeout")
        assert "the handler did not stop: its thread was abandoned" in abandoned["error"]
        assert not node.events_named("lease.reaped")
        assert not other_node.events_named("lease.reaped")
        assert (await live_row(conn, job_id))["losses"] == 0

        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert tries == [1, 2]
        assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["timed_out"]


async def test_an_async_handler_is_cancelled_at_its_timeout(database: Database, conn: Connection[Record]) -> None:
    """A timeout counts as a failure, is recorded as Timeout and is retried."""
    app = rota.App("slow")
    reasons: list[str | None] = []

    @app.handler("slow", timeout=timedelta(milliseconds=200), max_attempts=2, backoff_base=timedelta(milliseconds=1))
    async def slow(job: rota.Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(job.stop_reason)

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "slow")
        assert await final_outcome(conn, job_id) == "dead: exhausted"

    assert reasons == ["timeout", "timeout"]
    assert {a["error_kind"] for a in await failed_attempts(conn, job_id)} == {"Timeout"}


async def test_an_open_transaction_after_complete_still_ends_at_the_timeout(
    database: Database, conn: Connection[Record]
) -> None:
    """job.complete() keeps the lease from being declared lost, but does not lift the job's timeout."""
    app = rota.App("lingering")

    @app.handler("linger", timeout=timedelta(milliseconds=500), max_attempts=1)
    async def linger(job: rota.Job[Any]) -> None:
        async with database.connect() as mine, mine.transaction():
            await job.complete(mine)
            await asyncio.Event().wait()

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "linger")
        assert await final_outcome(conn, job_id) == "dead: exhausted"


async def test_a_handler_cut_off_from_the_database_is_interrupted_before_its_lease_ends(
    database: Database, conn: Connection[Record]
) -> None:
    """Rule 6: the handler has stopped, by the database's clock, before another node may claim the job."""
    app = rota.App("island")
    stopped: list[tuple[str | None, Any]] = []

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append((job.stop_reason, await conn.fetchval("select clock_timestamp()")))
            raise

    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, app) as node:
            job_id = await insert_job(conn, "work")
            await wait_for_claim(conn, job_id)
            await node.wait_for_event("leases.extended")
            proxy.freeze(lambda _: True)
            await eventually(lambda: stopped, what="the interruption")
            ((reason, when),) = stopped
            assert reason == "lease_lost"

            row = await live_row(conn, job_id)
            assert when < row["lease_expires_at"]
            proxy.heal()
            node.stop()
            node.stop()
            await node.wait_until_stopped(within=25)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_a_job_dropped_on_an_untrusted_lease_counts_as_started(
    database: Database, conn: Connection[Record], delivery: str
) -> None:
    """Its handler was called, so an at-most-once job must not be called a second time."""
    app = rota.App("untrusted")
    calls: list[int] = []

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        if job.attempt == 1:
            await asyncio.Event().wait()

    with FaultyProxy(database.dsn) as proxy:
        # The lease is long, so the node is back before another node may reap it.
        async with run_node(proxy.dsn, app) as node:
            job_id = await insert_job(conn, "work", delivery=f"'{delivery}'", lease="interval '6 seconds'")
            await node.wait_for_event("jobs.claimed")  # not only committed: the node has the reply
            proxy.refuse()
            await node.wait_for_event("service.failed", service="dispatcher")
            # Simulate a long outage: the node no longer trusts the lease, although it is still valid.
            (attempt,) = node.daemon._loops.running.attempts  # type: ignore[union-attr]
            attempt.trusted_until = 0.0
            await node.wait_for_event("lease.lost", job_id=job_id)
            proxy.listen()
            await node.wait_for_turns("dispatcher", 3)
            how = await final_outcome(conn, job_id, within=15)
    if delivery == "at_most_once":
        assert (how, calls) == ("dead: lost", [1])
    else:
        assert (how, calls) == ("succeeded", [1, 2])
        assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["lost"]


async def test_a_locked_job_row_delays_only_its_own_job(database: Database, conn: Connection[Record]) -> None:
    """Settlement, heartbeat, reaper and cancellation skip a locked row; the job is settled when the lock is released."""
    app = rota.App("locked")
    go = asyncio.Event()

    @app.handler("wait")
    async def wait(_: rota.Job[Any]) -> None:
        await go.wait()

    @app.handler("quick")
    async def quick(_: rota.Job[Any]) -> None:
        return

    async with run_node(database.dsn, app) as node, database.connect() as client:
        locked, other = await insert_job(conn, "wait"), await insert_job(conn, "wait", lease="interval '10 s'")
        expired = await insert_job(conn, "unknown")
        for job_id in (locked, other):
            await wait_for_claim(conn, job_id)
        await conn.execute(
            "update rota.jobs set state = 'running', leased_by = gen_random_uuid(), fence_token = 1, attempt = 1, "
            "max_attempts = 3, lease_expires_at = now() - interval '1 s' where job_id = $1",
            expired,
        )
        transaction = client.transaction()
        await transaction.start()
        await client.execute("select from rota.jobs where job_id = any ($1) for update", [locked])
        assert await conn.fetchval("select rota.cancel($1)", locked) == "requested"

        await node.wait_for_event("lease.reaped", job_id=expired)
        assert await final_outcome(conn, await insert_job(conn, "quick")) == "succeeded"

        go.set()
        assert await final_outcome(conn, other) == "succeeded"
        assert (await live_row(conn, locked))["state"] == "running"

        await transaction.rollback()
        assert await final_outcome(conn, locked) in {"succeeded", "cancelled"}
        assert node.crash is None


async def test_an_attempt_that_waits_for_its_settlement_keeps_its_lease(
    database: Database, conn: Connection[Record]
) -> None:
    """The handler has finished: a settlement slower than a lease must not let the job run again."""
    app = rota.App("done")
    calls: list[int] = []

    @app.handler("quick")
    async def quick(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)

    with pytest.MonkeyPatch.context() as patch:
        real = queries.settle_succeeded
        has_recovered = asyncio.Event()

        async def fail_while_away(*args: Any, **kwargs: Any) -> Any:
            if not has_recovered.is_set():
                raise ConnectionResetError
            return await real(*args, **kwargs)

        patch.setattr(queries, "settle_succeeded", fail_while_away)
        async with run_node(database.dsn, app) as node, run_node(database.dsn, rota.App("reaper")) as other_node:
            job_id = await insert_job(conn, "quick")
            await node.wait_for_event("service.failed", service="settle")
            await wait_for_attempt_age(conn, 4.0, job_id=job_id)
            has_recovered.set()
            assert await final_outcome(conn, job_id, within=20) == "succeeded"
            assert not node.events_named("lease.reaped")
            assert not other_node.events_named("lease.reaped")

    assert calls == [1]


async def test_two_attempts_settled_in_one_batch_write_one_ledger_row(
    database: Database, conn: Connection[Record]
) -> None:
    """A lost attempt and its successor on the same node count as one success."""
    app = rota.App("twins")
    first_lost, go = asyncio.Event(), asyncio.Event()
    tokens: list[int] = []

    @app.handler("twin")
    async def twin(job: rota.Job[Any]) -> int:
        tokens.append(job.fence_token)
        while True:
            try:
                await go.wait()
            except asyncio.CancelledError:
                first_lost.set()
                continue
            return job.fence_token

    async with run_node(database.dsn, app, drain__grace="10s") as node:
        job_id = await insert_job(conn, "twin")
        await wait_for_claim(conn, job_id)
        await conn.execute(
            "update rota.jobs set state = 'scheduled', leased_by = null, lease_expires_at = null where job_id = $1",
            job_id,
        )
        await eventually(lambda: len(tokens) == 2, what="the second attempt")
        await first_lost.wait()
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"

        await node.wait_for_event("write.refused", job_id=job_id)
        (run,) = await ledger_rows(conn, job_id)
        assert (run["fence_token"], run["result"]) == (tokens[1], str(tokens[1]))
        assert node.metric("rota_settled_total", queue="default", handler="twin", settlement="succeeded") == 1


async def test_a_row_that_rejects_its_heartbeat_loses_only_its_own_lease(
    database: Database, conn: Connection[Record], waiting_app: rota.App
) -> None:
    """A user's trigger raises for one row: the other jobs keep their leases and the daemon keeps running."""
    await conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before update on rota.jobs for each row
        when (old.payload ? 'refused' and old.state = 'running' and new.state = 'running') execute function refuse();
        """
    )
    async with run_node(database.dsn, waiting_app) as node:
        refused = await insert_job(conn, "wait", '{"refused": true}')
        neighbours = [await insert_job(conn, "wait") for _ in range(4)]
        for job_id in (refused, *neighbours):
            await wait_for_claim(conn, job_id)
        await node.wait_for_event("row.refused", doing="heartbeat", job_id=refused)
        await node.wait_for_event("lease.lost", job_id=refused)
        await wait_for_attempt_age(conn, 4, job_id=neighbours[0])
        for job_id in neighbours:
            assert (await live_row(conn, job_id))["attempt"] == 1
            assert not node.events_named("lease.lost", job_id=job_id)
        assert node.crash is None
        node.stop()
        node.stop()
        await node.wait_until_stopped()
