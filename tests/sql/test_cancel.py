"""rota.cancel, cancel_many, reschedule, retry_now: what waits changes at once, what runs is asked; no lock hinders."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from factories import NODE, make_dead_letter, make_job, make_running_job, state_of, wait_until_blocked

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


async def test_a_waiting_job_goes_into_the_ledger_at_once(conn: Connection[Record]) -> None:
    """Cancelled is an end like any other: one ledger row, with who and why."""
    job_id = (await make_job(conn, attempt=2)).job_id
    await conn.execute("insert into rota.cancel_requests (job_id, requested_by) values ($1, 'someone')", job_id)
    assert await conn.fetchval("select rota.cancel($1, note => 'moot')", job_id) == "cancelled"
    run = await conn.fetchrow("select * from rota.job_runs")
    assert run is not None
    me = await conn.fetchval("select session_user::text")
    assert (run["job_id"], run["outcome"], run["attempts"], run["note"]) == (
        job_id,
        "cancelled",
        2,
        f"cancelled by {me}: moot",
    )
    assert await conn.fetchval("select count(*) from rota.jobs") == 0
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0
    audit = await conn.fetchrow("select * from rota.audit")
    assert audit is not None
    assert (audit["done_by"], audit["action"], audit["target"], audit["reason"]) == (
        me,
        "cancel",
        f"job {job_id}",
        "moot",
    )


async def test_a_running_job_is_asked_and_its_row_not_touched(conn: Connection[Record], database: Database) -> None:
    """A lock on the row, or a new version of it, would get in the way of the heartbeat."""
    job_id, _ = await make_running_job(conn)
    before = await conn.fetchrow("select xmin, xmax, * from rota.jobs")
    heard: asyncio.Queue[object] = asyncio.Queue()
    async with database.connect() as listener:
        await listener.add_listener("rota_cancel", lambda *notice: heard.put_nowait(notice[3]))
        assert await conn.fetchval("select rota.cancel($1)", job_id) == "requested"
        assert await asyncio.wait_for(heard.get(), 10) == str(job_id)
    assert await conn.fetchrow("select xmin, xmax, * from rota.jobs") == before
    assert await conn.fetchval("select job_id from rota.cancel_requests") == job_id
    assert await conn.fetchval("select rota.cancel($1)", job_id) == "requested"
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 1


@pytest.mark.parametrize("force", [False, True])
async def test_cancel_does_not_wait_for_a_locked_row(
    conn: Connection[Record], database: Database, *, force: bool
) -> None:
    """A claim, or a transaction that somebody forgot, holds the row: the request is left behind and nobody hangs."""
    job_id = (await make_job(conn)).job_id
    async with database.connect() as other, other.transaction():
        await other.execute("select from rota.jobs where job_id = $1 for update", job_id)
        await conn.execute("set lock_timeout = '2s'")
        assert await conn.fetchval("select rota.cancel($1, force => $2)", job_id, force) == "requested"
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_force_ends_a_running_job_and_makes_its_token_stale(conn: Connection[Record], database: Database) -> None:
    """Afterwards the holder can write nothing: its row is gone, and it hears of it soon."""
    job_id, token = await make_running_job(conn)
    heard: asyncio.Queue[object] = asyncio.Queue()
    async with database.connect() as listener:
        await listener.add_listener("rota_cancel", lambda *notice: heard.put_nowait(notice[3]))
        assert await conn.fetchval("select rota.cancel($1, force => true)", job_id) == "cancelled"
        assert await asyncio.wait_for(heard.get(), 10) == str(job_id)
    run = await conn.fetchrow("select outcome, node, fence_token from rota.job_runs where job_id = $1", job_id)
    assert run is not None
    assert tuple(run) == ("cancelled", NODE, token)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.complete($1, $2)", job_id, token)
    assert refused.value.sqlstate == "RT001"


async def test_what_has_ended_is_finished_and_what_never_was_is_unknown(conn: Connection[Record]) -> None:
    """The three answers never blur: done before, dead already, no such number."""
    job_id, token = await make_running_job(conn)
    await conn.execute("select rota.complete($1, $2)", job_id, token)
    letter = await make_dead_letter(conn)
    assert await conn.fetchval("select rota.cancel($1)", job_id) == "finished"
    assert await conn.fetchval("select rota.cancel($1, force => true)", letter) == "finished"
    assert await state_of(conn, letter) == "dead"
    for nobody in (letter + 1000, None):
        with pytest.raises(asyncpg.PostgresError, match="no job") as refused:
            await conn.execute("select rota.cancel($1)", nobody)
        assert refused.value.sqlstate == "RT003"
    assert await conn.fetchval("select count(*) from rota.audit") == 0


async def test_a_client_cancels_and_reschedules_its_own_jobs_only(conn: Connection[Record]) -> None:
    """One tenant's mistake must not stop another's work; an operator may."""
    await conn.execute("begin")
    theirs = (await make_job(conn)).job_id
    await conn.execute(
        """
        create role cancel_client;
        grant usage on schema rota to cancel_client;
        grant insert (handler), select (job_id) on rota.jobs to cancel_client;
        grant select on rota.handlers to cancel_client;
        grant execute on function rota.cancel, rota.reschedule, rota.is_name, rota.is_duration
            to cancel_client;
        set local role cancel_client;
        """
    )
    own = await conn.fetchval("insert into rota.jobs (handler) values ('h') returning job_id")
    for statement in ("select rota.cancel($1)", "select rota.cancel($1, force => true)", "select rota.reschedule($1)"):
        await conn.execute("savepoint before")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=f"job {theirs} is not yours"):
            await conn.execute(statement, theirs)
        await conn.execute("rollback to before")
    await conn.execute("select rota.reschedule($1)", own)
    assert await conn.fetchval("select rota.cancel($1)", own) == "cancelled"
    await conn.execute("reset role")
    assert await conn.fetchval("select note from rota.job_runs where job_id = $1", own) == "cancelled by cancel_client"
    assert await conn.fetchval("select count(*) from rota.audit") == 0, "a client's own jobs are its own business"
    await conn.execute("rollback")


async def test_cancel_many_takes_what_waits_asks_what_runs_and_ends_at_zero(conn: Connection[Record]) -> None:
    """An operator loops until nothing is left: each call is bounded, and the loop ends."""
    waiting = [(await make_job(conn)).job_id for _ in range(5)]
    running_one, _ = await make_running_job(conn)
    other = (await make_job(conn, handler="other")).job_id
    call = """select cancelled, requested from rota.cancel_many(handler => 'h', "limit" => 4, note => 'outage')"""
    assert [tuple(row) for row in await conn.fetch(call)] == [(4, 0)]
    assert await state_of(conn, waiting[4]) == "due", "the oldest go first"
    assert [tuple(row) for row in await conn.fetch(call)] == [(1, 1)]
    assert [tuple(row) for row in await conn.fetch(call)] == [(0, 0)]
    assert await conn.fetchval("select job_id from rota.cancel_requests") == running_one
    assert await state_of(conn, other) == "due"
    assert await conn.fetchval("select count(*) from rota.job_runs where note like '%: outage'") == 5
    audit = await conn.fetch("select action, target, reason, affected from rota.audit order by audit_id")
    assert [tuple(row) for row in audit] == [
        ("cancel many", "handler h", "outage", 4),
        ("cancel many", "handler h", "outage", 2),
        ("cancel many", "handler h", "outage", 0),
    ]


async def test_cancel_many_steps_over_locked_rows(conn: Connection[Record], database: Database) -> None:
    """One forgotten transaction must not keep an operator from stopping the rest."""
    locked, free = (await make_job(conn)).job_id, (await make_job(conn)).job_id
    async with database.connect() as other, other.transaction():
        await other.execute("select from rota.jobs where job_id = $1 for update", locked)
        await conn.execute("set lock_timeout = '2s'")
        row = await conn.fetchrow("select * from rota.cancel_many(queue => 'default')")
        assert row is not None
        assert tuple(row) == (1, 0)
    assert await state_of(conn, free) == "cancelled"
    assert await state_of(conn, locked) == "due"


@pytest.mark.parametrize(
    "call",
    [
        "rota.cancel_many()",
        """rota.cancel_many(handler => 'h', "limit" => 0)""",
        """rota.cancel_many(handler => 'h', "limit" => 10001)""",
        """rota.retry_now("limit" => -1)""",
        """rota.redrive_many("limit" => 0)""",
        """rota.discard_many(handler => 'h', "limit" => 0)""",
        "rota.discard_many()",
        "rota.redrive_many(spread => '0 s')",
        "rota.redrive_many(spread => '1 month')",
        "rota.retry_now(note => repeat('x', 1001))",
    ],
)
async def test_bulk_calls_refuse_what_nobody_can_mean(conn: Connection[Record], call: str) -> None:
    """Without a filter, or without a bound, a slip of the hand would reach everything."""
    await make_job(conn)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute(f"select * from {call}")
    assert refused.value.sqlstate == "RT006"
    assert refused.value.hint


async def test_reschedule_moves_run_at_and_nothing_else(conn: Connection[Record]) -> None:
    """The identity of the job, scheduled_for and the key made of it, stays."""
    job_id = (await make_job(conn)).job_id
    before = await conn.fetchrow("select * from rota.jobs")
    stored = await conn.fetchval("select rota.reschedule($1, '2030-05-01 12:00+02')", job_id)
    after = await conn.fetchrow("select * from rota.jobs")
    assert before is not None
    assert after is not None
    assert stored == after["run_at"] == datetime(2030, 5, 1, 10, tzinfo=UTC)
    assert {**before, "run_at": None} == {**after, "run_at": None}


async def test_reschedule_refuses_what_does_not_wait(conn: Connection[Record]) -> None:
    """A running job has no next instant; an ended one needs a redrive or a new job; each is told apart."""
    busy, token = await make_running_job(conn)
    with pytest.raises(asyncpg.PostgresError, match="is running") as refused:
        await conn.execute("select rota.reschedule($1, now())", busy)
    assert refused.value.sqlstate == "RT004"
    await conn.execute("select rota.complete($1, $2)", busy, token)
    with pytest.raises(asyncpg.PostgresError, match="succeeded") as refused:
        await conn.execute("select rota.reschedule($1, now())", busy)
    assert refused.value.sqlstate == "RT004"
    letter = await make_dead_letter(conn)
    with pytest.raises(asyncpg.PostgresError, match="dead") as refused:
        await conn.execute("select rota.reschedule($1, now())", letter)
    assert refused.value.sqlstate == "RT004"
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.reschedule($1, now())", letter + 1000)
    assert refused.value.sqlstate == "RT003"


async def test_reschedule_that_meets_a_claim_in_flight_is_refused(conn: Connection[Record], database: Database) -> None:
    """It waits for the claim's commit and then judges by the row that is there."""
    job_id = (await make_job(conn)).job_id
    async with database.connect() as other, database.connect() as watcher:
        claim = other.transaction()
        await claim.start()
        await other.execute(
            "update rota.jobs set state = 'running', attempt = 1, fence_token = nextval('rota.fence_tokens'), "
            "leased_by = gen_random_uuid(), lease_expires_at = now() + interval '30 s'"
        )
        waiting = asyncio.create_task(conn.execute("select rota.reschedule($1, now())", job_id))
        await wait_until_blocked(conn, watched_by=watcher)
        await claim.commit()
        with pytest.raises(asyncpg.PostgresError) as refused:
            await waiting
    assert refused.value.sqlstate == "RT004"


async def test_retry_now_wakes_those_that_wait_for_their_retry_only(conn: Connection[Record]) -> None:
    """A job planned for the future by its author isn't a retry, and stays where it is."""
    retrying = (await make_job(conn, attempt=1, run_at=timedelta(hours=1))).job_id
    future = (await make_job(conn, run_at=timedelta(hours=1))).job_id
    other = (await make_job(conn, attempt=1, run_at=timedelta(hours=1), handler="other")).job_id
    assert await conn.fetchval("select rota.retry_now(handler => 'h')") == 1
    assert [await state_of(conn, job) for job in (retrying, future, other)] == ["due", "future", "retrying"]
    assert await conn.fetchval("select rota.retry_now(handler => 'h')") == 0
    assert await conn.fetchval("select attempt from rota.jobs where job_id = $1", retrying) == 1
