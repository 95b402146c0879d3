"""Lost leases: jobs whose holder is gone run again, with limits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import rota
import rota.services.reaper as reaper_module
from daemon_queries import claim
from factories import make_handler, make_jobs
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, ledger_rows, live_row, run_node
from network_faults import FaultyProxy, is_listener
from rota.db import queries
from rota.domain.job import Suspects
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

CLAIM_FOR_UNKNOWN_NODE = """
update rota.jobs
set state = 'running', attempt = attempt + 1, fence_token = nextval('rota.fence_tokens'), leased_by = gen_random_uuid(),
    started_at = clock_timestamp() - interval '1 minute', lease_expires_at = clock_timestamp() + $2::interval,
    max_attempts = coalesce(max_attempts, 20), backoff_base = coalesce(backoff_base, interval '5 s'),
    backoff_cap = coalesce(backoff_cap, interval '1 hour'), lease = coalesce(lease, interval '3 s'),
    delivery = coalesce(delivery, 'at_least_once')
where job_id = $1
"""
"""Claim a job for a node that does not exist; $2 is the remaining time of its lease."""

EXPIRED, STILL_VALID = timedelta(seconds=-1), timedelta(hours=1)


async def insert_held_job(
    conn: Connection[Record], handler: str, remaining: timedelta = EXPIRED, **columns: Any
) -> int:
    """Insert a job that is claimed by a node that does not exist."""
    async with conn.transaction():
        job_id = await insert_job(conn, handler, **columns)
        await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, remaining)
    return job_id


def plain_app(calls: list[int]) -> rota.App:
    """An app whose handler `work` succeeds."""
    app = rota.App("plain")

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)

    return app


async def test_the_first_loss_is_retried_at_once(database: Database, conn: Connection[Record]) -> None:
    """A dead worker proves nothing against its job. The reaper reads the job's row, not a table of workers."""
    calls: list[int] = []
    async with run_node(database.dsn, plain_app(calls)) as node:
        job_id = await insert_held_job(conn, "work")
        assert await final_outcome(conn, job_id, within=3) == "succeeded"
        assert node.metric("rota_reaped_total") == 1
    assert calls == [2]
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["lost"]


async def test_a_valid_lease_is_never_reaped(database: Database, conn: Connection[Record]) -> None:
    """This holds even when the node has no row in rota.nodes."""
    async with run_node(database.dsn, plain_app([])) as node:
        job_id = await insert_held_job(conn, "work", STILL_VALID)
        await node.wait_for_turns("reaper", 3)
        assert (await live_row(conn, job_id))["state"] == "running"


async def test_a_second_loss_delays_the_job_and_a_third_makes_it_a_dead_letter(
    database: Database, conn: Connection[Record]
) -> None:
    """A job that kills its workers is delayed, then becomes a dead letter, by its own limit of losses."""
    async with run_node(database.dsn, rota.App("reaper")) as node:
        job_id = await insert_held_job(conn, "killer")
        await node.wait_for_event("lease.reaped", job_id=job_id)
        first = await live_row(conn, job_id)
        assert (first["losses"], first["run_at"] <= first["now"]) == (1, True)
        await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, EXPIRED)
        await node.wait_for_event("lease.reaped", job_id=job_id, times=2)
        second = await live_row(conn, job_id)
        assert second["losses"] == 2
        assert timedelta(seconds=1) < second["run_at"] - second["now"] <= timedelta(seconds=5)
        await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, EXPIRED)
        assert await final_outcome(conn, job_id) == "dead: poison"
    dead = await dead_letter(conn, job_id)

    assert (dead["attempt"], dead["losses"]) == (3, 3)
    assert [a["outcome"] for a in await failed_attempts(conn, job_id)] == ["lost"] * 3


async def test_a_job_lost_twice_gets_its_turn_while_other_work_fills_every_slot(
    database: Database, conn: Connection[Record]
) -> None:
    """Suspects are claimed separately, and would otherwise wait until other jobs leave a slot free."""
    calls: list[int] = []
    async with conn.transaction():
        suspect = await insert_job(conn, "work", priority=0)
        await conn.execute("update rota.jobs set losses = 2, attempt = 2")
        await conn.execute("insert into rota.jobs (handler) select 'work' from generate_series(1, 5000)")
    async with run_node(database.dsn, plain_app(calls), queues="default:1"):
        assert await final_outcome(conn, suspect) == "succeeded"
        assert await conn.fetchval("select count(*) from rota.jobs where state = 'scheduled'") > 0


async def test_a_loss_of_the_last_attempt_is_a_dead_letter(database: Database, conn: Connection[Record]) -> None:
    """The retry limits apply to losses as they do to failures."""
    async with run_node(database.dsn, rota.App("reaper")):
        job_id = await insert_held_job(conn, "work", max_attempts=1)
        assert await final_outcome(conn, job_id) == "dead: exhausted"


@pytest.mark.parametrize(
    ("does", "how"),
    [
        ("return", "succeeded"),
        ("raise", "dead: exhausted"),
        ("retry", "dead: exhausted"),
        ("snooze", "dead: exhausted"),
        ("time out", "dead: exhausted"),
        ("permanent", "dead: permanent"),
        ("drain", "dead: lost"),
        ("lost", "dead: lost"),
        ("bad payload", "dead: bad_payload"),
    ],
)
async def test_an_at_most_once_job_is_called_once_whatever_its_outcome(
    database: Database, conn: Connection[Record], does: str, how: str
) -> None:
    """The claim is the acknowledgement: every outcome except success is a dead letter, never a second call."""
    import asyncio

    app = rota.App("once")
    calls: list[str] = []

    @app.handler(
        "once", delivery="at_most_once", timeout=timedelta(seconds=1) if does == "time out" else None, max_attempts=9
    )
    async def once(_: rota.Job[int]) -> None:
        calls.append(does)
        match does:
            case "raise":
                raise ValueError
            case "retry":
                raise rota.Retry(after=timedelta(0))
            case "snooze":
                raise rota.Snooze(after=timedelta(0))
            case "permanent":
                raise rota.Permanent
            case "return":
                return
            case _:
                await asyncio.Event().wait()

    async with run_node(database.dsn, app, drain__timeout="0s") as node:
        payload = '"no number"' if does == "bad payload" else "1"
        job_id = await insert_job(conn, "once", payload)
        if does in {"drain", "lost"}:
            await eventually(lambda: calls, what="the call")
        if does == "drain":
            node.stop()
        if does == "lost":
            await conn.execute(
                "update rota.jobs set lease_expires_at = now() - interval '1 s', leased_by = gen_random_uuid()"
            )
        assert await final_outcome(conn, job_id) == how
        if does != "drain":
            await node.wait_for_turns("dispatcher")
        if does == "lost":
            await node.wait_for_event("lease.lost", job_id=job_id)

    assert calls == ([] if does == "bad payload" else [does])


async def test_b55_the_reaper_changes_no_job_that_was_settled_or_extended_after_its_search(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job settled, extended or claimed again after the reaper's search stays unchanged."""
    real = queries.find_expired_leases
    jobs: dict[str, int] = {}

    async def change_jobs_after_search(*args: Any, **kwargs: Any) -> Any:
        found = await real(*args, **kwargs)
        if found:
            await conn.execute(
                "select rota.complete($1, fence_token) from rota.jobs where job_id = $1", jobs["settled"]
            )
            await conn.execute(
                "update rota.jobs set lease_expires_at = now() + interval '1 hour' where job_id = $1", jobs["renewed"]
            )
            await conn.execute(CLAIM_FOR_UNKNOWN_NODE, jobs["claimed"], STILL_VALID)
        return found

    async with run_node(database.dsn, rota.App("reaper")) as node:
        await node.wait_for_turns("reaper")
        monkeypatch.setattr(queries, "find_expired_leases", change_jobs_after_search)
        async with conn.transaction():
            for name in ("settled", "renewed", "claimed"):
                jobs[name] = await insert_job(conn, name)
                await conn.execute(CLAIM_FOR_UNKNOWN_NODE, jobs[name], EXPIRED)
        await node.wait_for_turns("reaper", 3)
        assert not node.events_named("lease.reaped")
    assert [run["outcome"] for run in await ledger_rows(conn, jobs["settled"])] == ["succeeded"]

    for name in ("renewed", "claimed"):
        assert (await live_row(conn, jobs[name]))["state"] == "running"
        assert await failed_attempts(conn, jobs[name]) == []


async def test_b49_a_row_that_cannot_be_written_does_not_stop_the_sweep(
    database: Database, conn: Connection[Record]
) -> None:
    """A dead letter with this job_id exists already. Only this row is skipped."""
    async with run_node(database.dsn, rota.App("reaper")) as node:
        async with conn.transaction():
            bad = await insert_job(conn, "work", max_attempts=1)
            good = [await insert_job(conn, "work", max_attempts=1) for _ in range(5)]
            await conn.execute(
                """
                insert into rota.dead_letters (job_id, run_at, scheduled_for, created_at, attempt, losses, releases, priority,
                    exclusive, handler, queue, created_by, payload, reason)
                values ($1, now(), now(), now(), 1, 0, 0, 5, false, 'work', 'default', 'me', '{}', 'lost')
                """,
                bad,
            )
            for job_id in [bad, *good]:
                await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, EXPIRED)
        for job_id in good:
            assert await final_outcome(conn, job_id) == "dead: exhausted"
        assert node.crash is None


async def test_rows_that_cannot_be_written_do_not_fill_every_batch(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come first by job_id in every sweep, and would keep later jobs from being reaped."""
    monkeypatch.setattr(reaper_module, "BATCH", 3)
    async with run_node(database.dsn, rota.App("reaper")) as node:
        async with conn.transaction():
            jobs = [await insert_job(conn, "work", max_attempts=1) for _ in range(9)]
            for job_id in jobs:
                await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, EXPIRED)
            await conn.execute(
                f"""
                create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
                create trigger refuse before insert on rota.attempts for each row when (new.job_id <= {jobs[6]})
                execute function refuse();
                """
            )
        for job_id in jobs[7:]:
            assert await final_outcome(conn, job_id) == "dead: exhausted"
        assert node.events_named("settlement.rejected")

    assert await conn.fetchval("select count(*) from rota.jobs") == 7


async def test_after_a_jump_of_the_databases_clock_the_reaper_waits_one_lease(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 7: after a clock jump, an expired lease proves nothing. Its node gets one lease to renew it."""
    ahead = [timedelta(0)]

    async def find_reaper_work(db: Any) -> queries.ReaperWork:
        found = await queries.find_reaper_work(db)
        return found._replace(now=found.now + ahead[0])

    patched = SimpleNamespace(**{**vars(queries), "find_reaper_work": find_reaper_work})
    monkeypatch.setattr(reaper_module, "queries", patched)

    async with run_node(database.dsn, rota.App("reaper")) as node:
        await node.wait_for_turns("reaper")
        ahead[0] = timedelta(seconds=30)
        await node.wait_for_event("reaper.waits")
        job_id = await insert_held_job(conn, "work")
        assert not node.events_named("lease.reaped")

        await node.wait_for_event("lease.reaped", job_id=job_id)
        waited = await conn.fetchval(
            "select finished_at - (select started_at + interval '1 minute' from rota.jobs where job_id = $1) "
            "from rota.attempts where job_id = $1",
            job_id,
        )
        assert waited > timedelta(seconds=2)


async def test_a_slow_reply_is_not_taken_for_a_clock_jump(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow server or a blocked loop would keep the reaper from acting at all."""
    monkeypatch.setattr(reaper_module, "MAX_CLOCK_GAIN_SECONDS", 0.5)
    with FaultyProxy(database.dsn) as proxy:
        async with run_node(proxy.dsn, rota.App("reaper"), lease__duration="1h") as node:
            await node.wait_for_turns("reaper")
            proxy.slow(lambda name: not is_listener(name), 0.8)
            await node.wait_for_turns("reaper")
            proxy.heal()
            await node.wait_for_turns("reaper")
            assert not node.events_named("reaper.waits")
            job_id = await insert_held_job(conn, "work")
            await node.wait_for_event("lease.reaped", job_id=job_id)


async def test_reapers_of_many_nodes_write_each_loss_once(database: Database, conn: Connection[Record]) -> None:
    """Every node runs a reaper; each loss is one row of history and one count."""
    async with (
        run_node(database.dsn, rota.App("a")) as node,
        run_node(database.dsn, rota.App("b")) as other_node,
        run_node(database.dsn, rota.App("c")) as third_node,
    ):
        jobs = []
        async with conn.transaction():
            for _ in range(200):
                job_id = await insert_job(conn, "unknown")
                await conn.execute(CLAIM_FOR_UNKNOWN_NODE, job_id, EXPIRED)
                jobs.append(job_id)

        async def all_are_reaped() -> bool:
            return not await conn.fetchval("select count(*) from rota.jobs where state = 'running'")

        await eventually(all_are_reaped, what="the end of all leases")
        assert sum(each.metric("rota_reaped_total") for each in (node, other_node, third_node)) == 200

    assert await conn.fetchval("select count(*) from rota.attempts") == 200
    assert await conn.fetchval("select max(losses) from rota.jobs") == 1


async def test_jobs_lost_twice_share_probation_once_some_have_succeeded(
    database: Database, conn: Connection[Record]
) -> None:
    """C10: after two fleet-wide power cuts suspects run 1, 2, 4, ... at once. One by one, 40 jobs of 0.2 s took 15 s."""
    app = rota.App("probation")
    running, most_at_once = 0, 0

    @app.handler("work")
    async def work(_: rota.Job[Any]) -> None:
        nonlocal running, most_at_once
        running += 1
        most_at_once = max(most_at_once, running)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.Event().wait()
        running -= 1

    await conn.execute("insert into rota.jobs (handler) select 'work' from generate_series(1, 40)")
    await conn.execute("update rota.jobs set losses = 2, attempt = 2")

    async with run_node(database.dsn, app, queues="default:100"):
        await eventually(partial(_none_is_live, conn), within=20, what="the end of all suspects")
    seconds = await conn.fetchval("select extract(epoch from max(finished_at) - min(started_at)) from rota.job_runs")

    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'succeeded'") == 40
    assert seconds < 5
    assert most_at_once > 4


async def _none_is_live(conn: Connection[Record]) -> bool:
    return not await conn.fetchval("select exists (select from rota.jobs)")


@pytest.mark.parametrize(
    ("lost_before", "attempt", "may_share"), [(0, 2, True), (2, 2, True), (1, 3, False), (3, 3, False), (2, 19, False)]
)
async def test_a_suspect_that_was_lost_beside_others_runs_alone(
    conn: Connection[Record], lost_before: int, attempt: int, may_share: bool
) -> None:
    """Beside others a suspect is claimed with one loss fewer, so that a killer among them buries none of its neighbours.

    The next run must be conclusive, so it is alone. A last attempt is alone, too: a neighbour could exhaust it.
    """
    await make_handler(conn)
    await make_jobs(conn, 3)
    await conn.execute("update rota.jobs set losses = 2, attempt = $1, max_attempts = 20", attempt)
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome, started_at) "
        "select job_id, n, n, 'lost', now() from rota.jobs, generate_series(1, $1::int) as n",
        lost_before,
    )
    shared = await claim(conn, 3, suspects=Suspects.SHARED)
    alone = await claim(conn, 1, suspects=Suspects.ALONE)
    assert (len(shared), len(alone)) == ((3, 0) if may_share else (0, 1))

    losses = await conn.fetch("select distinct losses from rota.jobs where state = 'running'")
    assert [row["losses"] for row in losses] == [1 if may_share else 2]
