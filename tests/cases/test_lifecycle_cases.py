"""Public failures of job systems, by their ids in the collection of cases: what went wrong there must not happen here."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import rota
from in_process_daemons import (
    failed_attempts,
    final_outcome,
    gated_app,
    insert_job,
    ledger_rows,
    live_row,
    run_node,
    wait_for_attempt_age,
    wait_for_claim,
)
from network_faults import FaultyProxy
from reply_loss import lossy_proxy
from rota.db import queries
from rota.domain.backoff import backoff
from rota.runtime import clock
from waiting import eventually

if TYPE_CHECKING:
    import pytest
    from asyncpg import Connection, Record

    from servers import Database

LONG_AGO = "now() - interval '10 minutes'"


async def test_b45_strict_priority_can_starve_and_the_age_of_what_starves_can_be_seen(
    database: Database, conn: Connection[Record]
) -> None:
    """Urgent work at more than capacity beside one patient job: its age is a figure of its own, by priority."""
    go, calls = asyncio.Event(), list[int]()
    async with conn.transaction():
        for _ in range(20):
            await insert_job(conn, "wait", priority=1)
        patient = await insert_job(conn, "wait", priority=9, **dict.fromkeys(("run_at", "created_at"), LONG_AGO))
    async with run_node(database.dsn, gated_app(go, calls), queues="default:1") as node:
        await node.wait_for_event("jobs.claimed")
        await node.wait_for_event("service.ran", service="gauges")
        assert node.metric("rota_oldest_due_seconds", queue="default", priority="9") >= 600
        assert node.metric("rota_oldest_due_seconds", queue="default", priority="1") < 600
        assert (await live_row(conn, patient))["attempt"] == 0
        go.set()
        assert await final_outcome(conn, patient) == "succeeded"
    assert calls[-1] == patient


async def test_b47_one_notification_makes_each_node_look_once(database: Database, conn: Connection[Record]) -> None:
    """Ten nodes of fifty slots, one job: a look per node, not one per slot; and one claim."""
    go, calls = asyncio.Event(), list[int]()
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                run_node(
                    database.dsn,
                    gated_app(go, calls),
                    queues="default:50",
                    poll_interval="1m",
                    database__pool_size=2,
                    lease__reap_interval="10s",
                )
            )
            for _ in range(10)
        ]

        def looks() -> list[int]:
            return [len(each.events_named("service.ran", service="dispatcher")) for each in nodes]

        async def all_armed() -> bool:
            return bool(
                await conn.fetchval(
                    "select count(*) = 10 from pg_locks where locktype = 'advisory' and mode = 'ShareLock' "
                    "and database = (select oid from pg_database where datname = current_database())"
                )
            )

        await eventually(all_armed, what="ten waiting dispatchers")
        settled = [0]

        def quiet() -> bool:
            now = sum(looks())
            seen = sum(len(each.events_named("service.ran", service="trust")) for each in nodes)
            if now != settled[0]:
                settled[:] = [now, seen]
            return len(settled) == 2 and seen > settled[1] + 20

        await eventually(quiet, within=20, what="the end of all looks at the start")
        before = looks()
        go.set()
        job_id = await insert_job(conn, "wait")
        assert await final_outcome(conn, job_id) == "succeeded"
        for each in nodes:
            await each.wait_for_turns("trust", 2)
        more = [after - then for after, then in zip(looks(), before, strict=True)]
        # The one that got the job may look once more, for it claimed something.
        assert sum(more) <= 11, more
        assert max(more) <= 2, more
        assert sum(each.metric("rota_claimed_total", queue="default") for each in nodes) == 1
    assert calls == [job_id]


async def test_b55_b57_a_lease_belongs_to_an_incarnation_and_is_reaped_without_its_holders_name(
    database: Database, conn: Connection[Record]
) -> None:
    """The same process, host and app come back within the lease: heartbeats of the new one keep nothing of the old one's."""
    go, calls = asyncio.Event(), list[int]()
    async with run_node(database.dsn, gated_app(go, calls)) as node:
        job_id = await insert_job(conn, "wait", delivery="'at_least_once'")
        old = await wait_for_claim(conn, job_id)
        # As after a kill -9 of the first: its token stays, its node is gone, another holds it by name only.
        await conn.execute("update rota.jobs set leased_by = gen_random_uuid() where job_id = $1", job_id)
        await node.wait_for_event("lease.lost", job_id=job_id)
        assert (await live_row(conn, job_id))["fence_token"] == old["fence_token"]
        await node.wait_for_event("lease.reaped", job_id=job_id)
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
    assert len(calls) == 2


async def test_b59_a_holder_that_was_cut_off_notices_and_counts_for_nothing(
    database: Database, conn: Connection[Record]
) -> None:
    """The way to the database is blocked for two leases and restored: the handler was cut, another's success stands."""
    begun, cut = asyncio.Event(), list[str | None]()
    isolated, other = rota.App("shared"), rota.App("shared")

    @isolated.handler("work")
    async def work(job: rota.Job[Any]) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.append(job.stop_reason)
        return "zombie"

    @other.handler("work")
    async def take_over(_: rota.Job[Any]) -> str:
        return "taken over"

    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, isolated) as node:
            job_id = await insert_job(conn, "work")
            await begun.wait()  # the row is there before the answer to the claim, which must not be frozen
            proxy.freeze(lambda _: True)
            async with run_node(database.dsn, other):
                assert await final_outcome(conn, job_id, within=15) == "succeeded"
            assert cut == ["lease_lost"]
            proxy.heal()
            await node.wait_for_event(
                "service.ran",
                service="reaper",
                times=len(node.events_named("service.ran", service="reaper")) + 1,
                within=30,
            )
            assert node.metric("rota_leases_lost_total") == 1
    (run,) = await ledger_rows(conn, job_id)
    assert run["result"] == '"taken over"'
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["lost"]


async def test_b61_a_nodes_clock_decides_nothing(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead on the wall: nothing is reaped, fired or finished early, because only the database is asked."""
    go, calls = asyncio.Event(), list[int]()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    async with run_node(database.dsn, gated_app(go, calls)) as node:
        future = await insert_job(conn, "wait", run_at="now() + interval '30 minutes'")
        held = await insert_job(conn, "nobody's")
        await conn.execute(
            "update rota.jobs set state = 'running', leased_by = gen_random_uuid(), fence_token = 1, attempt = 1, "
            "lease_expires_at = now() + interval '30 minutes' where job_id = $1",
            held,
        )
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        await wait_for_attempt_age(conn, 3.5, job_id=job_id)
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert not node.events_named("lease.reaped")
        assert (await live_row(conn, future))["attempt"] == 0
        assert (await live_row(conn, held))["state"] == "running"
        (run,) = await ledger_rows(conn, job_id)
        assert run["finished_at"] <= await conn.fetchval("select clock_timestamp()")
    assert not hasattr(clock, "datetime")


async def test_b63_the_heartbeat_outlives_the_order_to_stop(database: Database, conn: Connection[Record]) -> None:
    """A job longer than its lease, ordered to stop at its start, beside a node that would take it: one execution."""
    go, calls = asyncio.Event(), list[int]()
    async with run_node(database.dsn, gated_app(go, calls), drain__timeout="90s") as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        node.stop()
        async with run_node(database.dsn, gated_app(go, calls)):
            await wait_for_attempt_age(conn, 4.5, job_id=job_id)
            go.set()
            assert await final_outcome(conn, job_id) == "succeeded"
    assert calls == [job_id]
    assert await failed_attempts(conn, job_id) == []


async def test_b65_a_settlement_between_the_heartbeats_look_and_its_answer_is_no_news(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race is harmless: nothing is counted as lost, and no warning is logged."""
    go, calls = asyncio.Event(), list[int]()
    real = queries.extend_leases
    raced = asyncio.Event()
    main = asyncio.get_running_loop()

    async def settled_meanwhile(*args: Any, **kwargs: Any) -> Any:
        main.call_soon_threadsafe(go.set)
        await eventually(lambda: bool(node.events_named("job.settled", settlement="succeeded")), what="the settlement")
        main.call_soon_threadsafe(raced.set)
        return await real(*args, **kwargs)

    async with run_node(database.dsn, gated_app(go, calls)) as node:
        monkeypatch.setattr(queries, "extend_leases", settled_meanwhile)
        job_id = await insert_job(conn, "wait")
        assert await final_outcome(conn, job_id) == "succeeded"
        await raced.wait()
        await node.wait_for_turns("heartbeat", 2)
        assert node.metric("rota_leases_lost_total") == node.metric("rota_stale_writes_total") == 0
        assert not node.events_named("lease.lost")
        assert not node.events_named("write.refused")


def test_b69_delays_are_capped() -> None:
    """Thirty attempts with a base of a second: no delay above the cap, and a span that a person can wait for."""
    cap = timedelta(minutes=10)
    delays = [backoff(n, base=timedelta(seconds=1), cap=cap, random=lambda: 1.0) for n in range(1, 31)]
    assert delays == sorted(delays)
    assert delays[-1] == cap
    assert sum(delays, timedelta(0)) < timedelta(hours=4)
    ours = [backoff(n, base=timedelta(seconds=5), cap=timedelta(hours=1), random=lambda: 1.0) for n in range(1, 20)]
    assert timedelta(hours=9) < sum(ours, timedelta(0)) < timedelta(hours=11)


async def test_b71_the_row_of_a_job_stays_small_whatever_happens_to_it(
    database: Database, conn: Connection[Record]
) -> None:
    """History beside the row and bounded: see also the tests of outcomes."""
    app = rota.App("history")

    @app.handler("fail", max_attempts=30, backoff_base=timedelta(microseconds=1), backoff_cap=timedelta(microseconds=1))
    async def fail(job: rota.Job[Any]) -> None:
        if job.attempt <= 29:
            raise ValueError("x" * 1_000_000)

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "fail")
        assert await final_outcome(conn, job_id, within=30) == "succeeded"
    kept = await failed_attempts(conn, job_id)
    assert len(kept) == 20
    assert [a["attempt"] for a in kept] == list(range(10, 30))
    assert max(len(a["error"].encode()) for a in kept) <= 8192


async def test_b75_a_stop_interrupts_and_releases_all_in_one_go(database: Database, conn: Connection[Record]) -> None:
    """Twenty handlers that need a minute, a drain of half a second: all released by fenced writes, none lost."""
    go, calls = asyncio.Event(), list[int]()
    async with run_node(database.dsn, gated_app(go, calls), queues="default:20", drain__timeout="500ms") as node:
        async with conn.transaction():
            jobs = [await insert_job(conn, "wait") for _ in range(20)]
        await eventually(lambda: len(calls) == 20, what="all twenty")
        node.stop()
        await node.wait_until_stopped(within=5)
        assert node.crash is None
    rows = await conn.fetch("select * from rota.jobs")
    assert {(r["state"], r["attempt"], r["releases"], r["leased_by"]) for r in rows} == {("scheduled", 0, 1, None)}
    assert len(rows) == len(jobs)
    assert await conn.fetchval("select array_agg(distinct outcome) from rota.attempts") == ["interrupted"]
    assert not await conn.fetchval(
        "select count(*) from pg_locks where relation = 'rota.jobs'::regclass and not fastpath"
    )


async def test_b81_a_daemon_outlives_every_kind_of_absence(database: Database, conn: Connection[Record]) -> None:
    """Refused, starting up, too many connections: it stays, is unready and alive, and goes on by itself."""
    go, calls = asyncio.Event(), list[int]()
    go.set()
    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, gated_app(go, calls)) as node:
            for absence in ("refused", "57P03", "53300"):
                failed = len(node.events_named("service.failed", service="dispatcher"))
                if absence == "refused":
                    proxy.refuse()
                else:
                    proxy.answer(absence, "not now")
                await node.wait_for_event("service.failed", service="dispatcher", times=failed + 2)
                assert node.crash is None
                assert all(service.well for service in node.daemon.services())
                proxy.heal()
                job_id = await insert_job(conn, "wait")
                assert await final_outcome(conn, job_id, within=20) == "succeeded"


async def test_b83_a_settlement_cut_after_its_commit_stands_once(database: Database, conn: Connection[Record]) -> None:
    """Unknown, so sent again; 'already settled by this very token' counts as success. A hundred jobs, each reply lost once."""
    go, calls = asyncio.Event(), list[int]()
    go.set()
    async with lossy_proxy(database.dsn) as way, run_node(way.dsn, gated_app(go, calls)) as node:
        for _ in range(10):
            way.lose_replies_to("Move jobs whose attempts succeeded")
            lost = way.lost_replies
            jobs = [await insert_job(conn, "wait") for _ in range(3)]
            for job_id in jobs:
                assert await final_outcome(conn, job_id) == "succeeded"
            await eventually(partial(lambda before: way.lost_replies > before, lost), what="the loss of a reply")
        await eventually(
            lambda: node.metric("rota_settled_total", queue="default", handler="wait", settlement="succeeded") == 30,
            what="the count of all successes",
        )
    assert len(calls) == len(set(calls)) == 30
    assert await conn.fetchval("select count(*) from rota.job_runs") == 30
