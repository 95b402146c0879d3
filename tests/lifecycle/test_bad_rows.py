"""Rows with values that cannot be processed. They were stored before a constraint existed, or past it by the owner."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from factories import without_check_constraints
from in_process_daemons import dead_letter, final_outcome, gated_app, insert_job, ledger_rows, run_node
from rota.lifecycle import refused_jobs, settle
from schedule_rows import Planner, make_due, make_schedule, read_dispositions
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

OVERFLOWS = "(interval '106751000 days' - 2562023976 * interval '1 hour')"
"""Equal to 24 hours, but adding its days alone to any instant overflows. PostgreSQL 14 can't read such a value as text."""

SECOND = timedelta(seconds=1)


def failing_app() -> rota.App:
    """An app with one handler that fails and one that succeeds."""
    app = rota.App("failing")

    @app.handler("fail")
    async def fail(_: rota.Job[Any]) -> None:
        raise ValueError("no")

    @app.handler("work")
    async def work(_: rota.Job[Any]) -> str:
        return "done"

    return app


@pytest.mark.parametrize(
    "columns",
    [
        {"retry_for": OVERFLOWS},
        {"backoff_base": OVERFLOWS, "backoff_cap": OVERFLOWS},
        {"backoff_base": "interval '178956970 years'", "backoff_cap": "interval '178956970 years'"},
        {"scheduled_for": "timestamptz '290000-01-01'", "retry_for": "interval '366 days'"},
        {"scheduled_for": "'infinity'", "retry_for": "interval '1 hour'"},
        {"scheduled_for": "timestamptz '4000-01-01 BC'", "retry_for": "interval '1 hour'", "max_attempts": 2147483647},
    ],
    ids=", ".join,
)
async def test_a_job_whose_settings_overflow_becomes_a_dead_letter(
    database: Database, conn: Connection[Record], columns: dict[str, Any]
) -> None:
    """This holds for a failure and for a lost lease, and other jobs in the same statements are settled."""
    async with without_check_constraints(conn, "rota.jobs"):
        bad = [await insert_job(conn, "fail", **columns) for _ in range(2)]
        # The claim already rejects a scheduled_for that is out of range.
        lost = (*(bad if "scheduled_for" in columns else bad[1:]), await insert_job(conn, "work"))
        await conn.execute(
            """
            update rota.jobs set state = 'running', attempt = 1, max_attempts = coalesce(max_attempts, 20),
                fence_token = nextval('rota.fence_tokens'),
                leased_by = gen_random_uuid(), started_at = now(), lease_expires_at = now() - interval '1 second'
            where job_id = any ($1)
            """,
            lost,
        )
    async with run_node(database.dsn, failing_app()) as node:
        good_jobs = [await insert_job(conn, "work") for _ in range(3)]
        for job_id in (*good_jobs, lost[-1]):
            assert await final_outcome(conn, job_id) == "succeeded"
        for job_id in bad:
            assert (await final_outcome(conn, job_id)).startswith("dead: ")
            assert node.events_named("job.settled", job_id=job_id, settlement="dead")
        await node.wait_for_turns("reaper")
        assert node.crash is None


@pytest.mark.parametrize(
    "columns",
    [
        {"run_at": "'-infinity'"},
        {
            "run_at": "timestamptz '4000-01-01 BC'",
            "scheduled_for": "now()",
            "created_at": "timestamptz '3000-01-01 BC'",
        },
        {"scheduled_for": "timestamptz '20000-01-01'", "created_at": "'infinity'"},
        {"scheduled_for": "'-infinity'", "created_at": "timestamptz '20000-01-01'"},
        {"scheduled_for": "timestamptz '4000-01-01 BC'"},
    ],
    ids=str,
)
async def test_a_job_with_an_instant_outside_pythons_range_runs_like_other_jobs(
    database: Database, conn: Connection[Record], columns: dict[str, Any]
) -> None:
    """A2: the values are decoded after the claim has committed, so a decoding error would block the whole batch."""
    async with without_check_constraints(conn, "rota.jobs"):
        jobs = [await insert_job(conn, "work", **columns), *[await insert_job(conn, "work") for _ in range(3)]]
        async with run_node(database.dsn, failing_app()) as node:
            for job_id in jobs:
                assert await final_outcome(conn, job_id) == "succeeded"
            assert not node.events_named("loop.crashed")


async def test_jobs_that_cannot_be_expired_or_cancelled_block_no_other_jobs(
    database: Database, conn: Connection[Record]
) -> None:
    """A foreign key of a user's table prevents it. The log names the two jobs, which end once the key is gone."""
    await conn.execute("create table public.orders (job_id bigint references rota.jobs)")
    overdue = [await insert_job(conn, "nobody", start_by="now() - interval '1 second'") for _ in range(3)]
    cancelled = [await insert_job(conn, "nobody") for _ in range(3)]
    await conn.execute("insert into public.orders values ($1), ($2)", overdue[1], cancelled[1])
    await conn.execute(
        "insert into rota.cancel_requests (job_id, requested_by) select unnest($1::bigint[]), 'me'", cancelled
    )

    async with run_node(database.dsn, failing_app()) as node:
        for job_id in (overdue[0], overdue[2]):
            assert await final_outcome(conn, job_id) == "expired"
        for job_id in (cancelled[0], cancelled[2]):
            assert await final_outcome(conn, job_id) == "cancelled"
        await node.wait_for_event("row.refused", doing="expire", job_id=overdue[1])
        await node.wait_for_event("row.refused", doing="cancel", job_id=cancelled[1])

        await conn.execute("delete from public.orders")
        assert await final_outcome(conn, overdue[1]) == "expired"
        assert await final_outcome(conn, cancelled[1]) == "cancelled"
        assert node.crash is None


async def test_a_success_that_cannot_be_stored_becomes_a_dead_letter_and_is_not_run_again(
    database: Database, conn: Connection[Record]
) -> None:
    """A second run would repeat the handler's effect."""
    await conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before insert on rota.job_runs for each row when (new.unique_key = 'refused')
        execute function refuse();
        """
    )
    async with run_node(database.dsn, failing_app()) as node:
        bad = await insert_job(conn, "work", unique_key="'refused'")
        good_job = await insert_job(conn, "work")
        assert await final_outcome(conn, good_job) == "succeeded"
        assert await final_outcome(conn, bad) == "dead: permanent"
        assert node.events_named("settlement.rejected", job_id=bad)
    dead = await dead_letter(conn, bad)

    assert (dead["attempt"], dead["error_kind"]) == (1, "SettlementRejected")
    assert "the attempt succeeded" in dead["error"]


async def drop_changes(conn: Connection[Record], trigger: str) -> None:
    """Make a user's trigger that drops changes of rota.jobs without an error."""
    await conn.execute(
        f"""
        create function public.drop_change() returns trigger language plpgsql as $$ begin return null; end $$;
        create trigger drop_change {trigger} execute function public.drop_change();
        """
    )


async def test_jobs_whose_claims_a_trigger_drops_are_reported_and_block_no_other_jobs(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing else is claimed, the daemon is not ready."""
    monkeypatch.setattr(refused_jobs, "IGNORED_SECONDS", 0.2)
    monkeypatch.setattr(refused_jobs, "SET_ASIDE_SECONDS", 0.5)
    await drop_changes(conn, "before update on rota.jobs for each row when (old.unique_key = 'dropped')")
    async with run_node(database.dsn, failing_app(), queues={"default": 1}) as node:
        dropped = await insert_job(conn, "work", unique_key="'dropped'")
        refused = await node.wait_for_event("row.refused", doing="claim", job_id=dropped)
        assert refused["kind"] == "ChangeIgnored"
        await eventually(lambda: node.daemon.readiness().reasons, what="the node not ready")
        (reason,) = node.daemon.readiness().reasons
        assert reason.startswith(f"claims of job {dropped} have changed nothing for")

        other = await insert_job(conn, "work")
        assert await final_outcome(conn, other) == "succeeded"
        await conn.execute("drop trigger drop_change on rota.jobs")
        assert await final_outcome(conn, dropped) == "succeeded"
        await eventually(lambda: not node.daemon.readiness().reasons, what="the node ready")
        assert all(service.well for service in node.daemon.services())


async def test_a_job_whose_settlement_a_trigger_drops_is_reported_and_not_run_again(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is settled once the trigger is gone."""
    monkeypatch.setattr(settle, "LOCKED_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(settle, "IGNORED_RETRY_SECONDS", 0.1)
    await drop_changes(conn, "before delete on rota.jobs for each row")
    async with run_node(database.dsn, failing_app()) as node:
        job_id = await insert_job(conn, "work")
        refused = await node.wait_for_event("row.refused", doing="settlement", job_id=job_id)
        assert refused["kind"] == "ChangeIgnored"
        await conn.execute("drop trigger drop_change on rota.jobs")
        assert await final_outcome(conn, job_id) == "succeeded"
        assert [run["attempts"] for run in await ledger_rows(conn, job_id)] == [1]


async def test_a_job_whose_extension_of_the_lease_a_trigger_drops_is_reported(
    database: Database, conn: Connection[Record]
) -> None:
    """Its lease ends, as if the heartbeat had not come."""
    await drop_changes(
        conn, "before update on rota.jobs for each row when (old.state = 'running' and new.state = 'running')"
    )
    go = asyncio.Event()
    async with run_node(database.dsn, gated_app(go, [])) as node:
        job_id = await insert_job(conn, "wait")
        refused = await node.wait_for_event("row.refused", doing="heartbeat", job_id=job_id)
        assert refused["kind"] == "ChangeIgnored"
        await conn.execute("drop trigger drop_change on rota.jobs")
        go.set()


BAD_SCHEDULES = {
    "a decision of year 20000": "update rota.schedule_clocks set last_fire_at = '20000-01-01', next_fire_at = '-infinity'",
    "an edit of year 20000": "update rota.schedule_definitions set edited_at = '20000-01-01', dst_gap = 'skip'",
    "an end in year 20000": "update rota.schedule_definitions set end_at = '20000-01-01'",
    "a start before Christ": "update rota.schedule_definitions set start_at = '4000-01-01 BC'",
    "a due instant before Christ": "update rota.schedule_clocks set next_fire_at = '4000-01-01 BC'",
    "an endless interval": "update rota.schedule_definitions set on_time_within = '178956970 years'",
    "a beat of nothing": "update rota.schedule_definitions set cron = null, every = '0'",
    "a beat of less than nothing": "update rota.schedule_definitions set cron = null, every = '-1 hour'",
    "a beat of years": "update rota.schedule_definitions set cron = null, every = '178956970 years'",
    "endless catching up": "update rota.schedule_definitions set misfire = 'all', catch_up_limit = 2147483647",
    "an unknown misfire": "update rota.schedule_definitions set misfire = 'bogus'",
    "an unknown timezone": "update rota.schedule_definitions set timezone = 'Mars/Olympus'",
    "no cron": "update rota.schedule_definitions set cron = 'bogus'",
    "a start_within that overflows": f"update rota.schedule_definitions set start_within = {OVERFLOWS}",
    "a lease that overflows": f"update rota.schedule_definitions set lease = {OVERFLOWS}",
    "an end of a pause": "update rota.schedule_definitions set paused = true, resume_at = now() - interval '1 hour', priority = 99",
}


@pytest.mark.parametrize("how", BAD_SCHEDULES.values(), ids=BAD_SCHEDULES)
async def test_a_schedule_that_cannot_be_planned_is_marked_invalid_and_blocks_no_other(
    conn: Connection[Record], planner: Planner, how: str
) -> None:
    """The log names only the bad schedule."""
    async with without_check_constraints(conn, "rota.schedule_definitions", "rota.schedule_clocks"):
        bad = await make_schedule(conn, "bad")
        good = await make_schedule(conn, "good")
        for each in (bad, good):
            await make_due(conn, each, ago=5 * SECOND)
        await conn.execute("alter table rota.schedule_definitions disable trigger user")
        await conn.execute(f"{how} where schedule_id = $1", bad)
        if "resume_at" in how:
            await make_due(conn, bad, ago=5 * SECOND)
        await conn.execute("alter table rota.schedule_definitions enable trigger user")
    for _ in range(3):
        await planner.turn()

    assert await read_dispositions(conn, good) == ["enqueued"]
    assert await conn.fetchval("select invalid_reason from rota.schedule_clocks where schedule_id = $1", bad)
    assert {event["schedule"] for event in planner.events_named("schedule.invalid")} == {"bad"}


async def test_a_waiting_fire_whose_job_is_rejected_blocks_no_other_fire(
    conn: Connection[Record], planner: Planner
) -> None:
    """The log names the schedule of the rejected fire."""
    schedule_ids = [await make_schedule(conn, name, overlap="queue_one") for name in ("one", "bad", "other")]
    await conn.execute(
        "insert into rota.fires (scheduled_for, schedule_id, name, disposition) "
        "select '2026-01-01 00:00+00', schedule_id, name, 'waiting' from rota.schedules"
    )
    await conn.execute(
        f'alter table rota.jobs add constraint "not this one" check (schedule_id <> {schedule_ids[1]}) not valid'
    )
    await planner.turn()
    assert [await read_dispositions(conn, each) for each in schedule_ids] == [["enqueued"], ["waiting"], ["enqueued"]]

    (event,) = planner.events_named("row.refused")
    assert (event["doing"], event["schedule"], event["schedule_id"]) == ("promote", "bad", schedule_ids[1])
