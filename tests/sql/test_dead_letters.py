"""rota.redrive, redrive_many, discard, discard_many: a dead letter waits for a person, and loses nothing meanwhile."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from factories import make_dead_letter, make_job, make_running_job, state_of, wait_until_blocked

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


async def test_redrive_keeps_the_job_and_gives_attempts_afresh(conn: Connection[Record]) -> None:
    """The world knows this job by its number and key; what ended it before must not end it again at once."""
    job_id = await make_dead_letter(conn, unique_key="k")
    letter = await conn.fetchrow("select * from rota.dead_letters")
    await conn.execute("insert into rota.cancel_requests (job_id, requested_by) values ($1, 'someone')", job_id)
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome) values ($1, 1, 1, 'failed')", job_id
    )
    await conn.execute("select rota.redrive($1, note => 'fixed')", job_id)
    job = await conn.fetchrow("select *, run_at = xact_start from rota.jobs, (select now() as xact_start) as x")
    assert letter is not None
    assert job is not None
    kept = [
        "job_id", "scheduled_for", "created_at", "created_by", "schedule_id", "handler", "queue", "priority", "payload",
        "delivery", "max_attempts", "backoff_base", "backoff_cap", "timeout", "lease", "unique_key", "idempotency_key",
        "meta", "checkpoint", "exclusive", "fence_token",
    ]  # fmt: skip
    assert {name: job[name] for name in kept} == {name: letter[name] for name in kept}
    assert [job[name] for name in ("state", "attempt", "losses", "releases", "start_by", "retry_for", "leased_by")] == [
        "scheduled", 0, 0, 0, None, None, None,
    ]  # fmt: skip
    assert await state_of(conn, job_id) == "due"
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0
    assert await conn.fetchval("select count(*) from rota.attempts") == 1
    audit = await conn.fetchrow("select action, target, reason from rota.audit")
    assert audit is not None
    assert tuple(audit) == ("redrive", f"job {job_id}", "fixed")


async def test_a_holder_from_before_the_redrive_can_write_nothing(conn: Connection[Record]) -> None:
    """The token stays on the row, but a row without an owner takes no settlement."""
    job_id = await make_dead_letter(conn)
    await conn.execute("select rota.redrive($1)", job_id)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.complete($1, fence_token) from rota.jobs", job_id)
    assert refused.value.sqlstate == "RT001"


async def test_redrive_with_a_payload_replaces_it(conn: Connection[Record]) -> None:
    """A payload that can't succeed is the commonest reason to be here."""
    job_id = await make_dead_letter(conn)
    await conn.execute("select rota.redrive($1, '{\"n\": 2}')", job_id)
    assert await conn.fetchval("select payload from rota.jobs") == '{"n": 2}'


async def test_redrive_with_a_payload_that_no_job_may_have_is_refused_and_the_letter_stays(
    conn: Connection[Record],
) -> None:
    """The bounds that keep a row harmless hold on this way in, too."""
    job_id = await make_dead_letter(conn)
    with pytest.raises(asyncpg.CheckViolationError, match="1 MiB"):
        await conn.execute("select rota.redrive($1, to_jsonb(repeat('x', 1048577)))", job_id)
    assert await state_of(conn, job_id) == "dead"


async def test_redrive_refuses_while_a_live_job_has_the_key_and_names_it(conn: Connection[Record]) -> None:
    """B49: the letter stays, and the person learns what to wait for."""
    job_id = await make_dead_letter(conn, unique_key="k")
    live = (await make_job(conn, unique_key="k")).job_id
    with pytest.raises(asyncpg.PostgresError, match=f"live job {live}") as refused:
        await conn.execute("select rota.redrive($1)", job_id)
    assert refused.value.sqlstate == "RT005"
    assert await state_of(conn, job_id) == "dead"


async def test_redrive_tells_live_ended_and_unknown_jobs_apart(conn: Connection[Record]) -> None:
    """Each needs another answer from the person."""
    live, token = await make_running_job(conn)
    for statement in ("select rota.redrive($1)", "select rota.discard($1)"):
        with pytest.raises(asyncpg.PostgresError, match="running") as refused:
            await conn.execute(statement, live)
        assert refused.value.sqlstate == "RT004"
        with pytest.raises(asyncpg.PostgresError) as refused:
            await conn.execute(statement, live + 1000)
        assert refused.value.sqlstate == "RT003"
    await conn.execute("select rota.complete($1, $2)", live, token)
    with pytest.raises(asyncpg.PostgresError, match="succeeded") as refused:
        await conn.execute("select rota.redrive($1)", live)
    assert refused.value.sqlstate == "RT004"


async def test_two_redrives_at_once_send_the_job_back_once(conn: Connection[Record], database: Database) -> None:
    """The second waits for the first and is told that the job lives."""
    job_id = await make_dead_letter(conn)
    async with database.connect() as other, database.connect() as watcher:
        first = other.transaction()
        await first.start()
        await other.execute("select rota.redrive($1)", job_id)
        second = asyncio.create_task(conn.execute("select rota.redrive($1)", job_id))
        await wait_until_blocked(conn, watched_by=watcher)
        await first.commit()
        with pytest.raises(asyncpg.PostgresError, match="scheduled") as refused:
            await second
    assert refused.value.sqlstate == "RT004"
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_redrive_many_leaves_out_what_is_blocked_and_fills_up_with_the_next(conn: Connection[Record]) -> None:
    """B49: one row that would break a unique index hinders none of the others, however far in front it lies."""
    blocked = [
        await make_dead_letter(conn, unique_key="k"),
        await make_dead_letter(conn, unique_key="k"),
        await make_dead_letter(conn, schedule_id=7),
    ]
    free = [await make_dead_letter(conn) for _ in range(4)]
    await make_job(conn, unique_key="k")
    await conn.execute("insert into rota.jobs (handler, schedule_id, exclusive) values ('other', 7, true)")
    call = """select redriven, left_out from rota.redrive_many(handler => 'h', "limit" => 3, note => 'fixed')"""
    assert [tuple(row) for row in await conn.fetch(call)] == [(3, 3)]
    assert [tuple(row) for row in await conn.fetch(call)] == [(1, 3)]
    assert [tuple(row) for row in await conn.fetch(call)] == [(0, 3)]
    assert [await state_of(conn, job) for job in free] == ["due"] * 4
    assert [await state_of(conn, job) for job in blocked] == ["dead"] * 3
    assert [row[0] for row in await conn.fetch("select affected from rota.audit order by audit_id")] == [3, 1, 0]


async def test_two_letters_with_one_key_in_a_batch_go_one_after_the_other(conn: Connection[Record]) -> None:
    """The older one goes; the younger stays a dead letter until it has ended."""
    older, younger = await make_dead_letter(conn, unique_key="k"), await make_dead_letter(conn, unique_key="k")
    row = await conn.fetchrow("select * from rota.redrive_many()")
    assert row is not None
    assert tuple(row) == (1, 1)
    assert [await state_of(conn, older), await state_of(conn, younger)] == ["due", "dead"]


async def test_redrive_many_leaves_at_most_once_out_unless_named(conn: Connection[Record]) -> None:
    """Its author asked for no second run: only a person who says so gives it one."""
    once = await make_dead_letter(conn, delivery="at_most_once", reason="lost")
    row = await conn.fetchrow("select * from rota.redrive_many(reason => 'lost')")
    assert row is not None
    assert tuple(row) == (0, 0)
    row = await conn.fetchrow("select * from rota.redrive_many(include_at_most_once => true)")
    assert row is not None
    assert tuple(row) == (1, 0)
    assert await state_of(conn, once) == "due"


async def test_redrive_many_spreads_evenly_in_the_order_of_the_jobs(conn: Connection[Record]) -> None:
    """What broke the target once must not come back as one wave."""
    jobs = [await make_dead_letter(conn) for _ in range(4)]
    async with conn.transaction():
        await conn.execute("select * from rota.redrive_many(spread => '1 hour')")
        rows = await conn.fetch("select job_id, run_at - now() as offset from rota.jobs order by run_at")
    assert [tuple(row) for row in rows] == [(job, timedelta(minutes=15 * n)) for n, job in enumerate(jobs)]


async def test_redrive_many_steps_over_letters_that_somebody_works_on(
    conn: Connection[Record], database: Database
) -> None:
    """Two operators at once share the work; neither waits."""
    locked, free = await make_dead_letter(conn), await make_dead_letter(conn)
    async with database.connect() as other, other.transaction():
        await other.execute("select rota.discard($1)", locked)
        await conn.execute("set lock_timeout = '2s'")
        row = await conn.fetchrow("select * from rota.redrive_many()")
        assert row is not None
        assert tuple(row) == (1, 0)
    assert await state_of(conn, free) == "due"
    assert await state_of(conn, locked) == "discarded"


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("handler => 'h'", 1),
        ("queue => 'default'", 2),
        ("queue => 'other'", 0),
        ("reason => 'poison'", 1),
        ("error_kind => 'ValueError'", 2),
        ("error_kind => 'KeyError'", 0),
        ("before => now() - interval '1 hour'", 0),
        ("before => now() + interval '1 hour'", 2),
    ],
)
async def test_filters_mean_the_same_for_redrive_and_discard(
    conn: Connection[Record], condition: str, taken: int
) -> None:
    """What a person has looked at with one of them is what the other acts on."""
    await make_dead_letter(conn)
    await make_dead_letter(conn, handler="g", reason="poison")
    redrive = conn.transaction()
    await redrive.start()
    assert await conn.fetchval(f"select redriven from rota.redrive_many({condition})") == taken
    await redrive.rollback()
    assert await conn.fetchval(f"select rota.discard_many({condition})") == taken


async def test_discard_ends_in_the_ledger_with_who_and_why(conn: Connection[Record]) -> None:
    """A job that was given up is accounted for like any other."""
    job_id = await make_dead_letter(conn, unique_key="k")
    await conn.execute("select rota.discard($1, 'the customer is gone')", job_id)
    me = await conn.fetchval("select session_user::text")
    run = await conn.fetchrow("select outcome, attempts, unique_key, idempotency_key, meta, note from rota.job_runs")
    assert run is not None
    assert tuple(run) == ("discarded", 20, "k", "mine", '{"tenant": 7}', f"discarded by {me}: the customer is gone")
    assert await state_of(conn, job_id) == "discarded"
    assert await conn.fetchval("select affected from rota.audit where action = 'discard' and done_by = $1", me) == 1


async def test_discard_many_is_bounded_and_ends_at_zero(conn: Connection[Record]) -> None:
    """One call is one transaction of a known size, and one row of audit."""
    for _ in range(5):
        await make_dead_letter(conn)
    call = """select rota.discard_many(handler => 'h', "limit" => 3, note => 'old')"""
    assert [await conn.fetchval(call) for _ in range(3)] == [3, 2, 0]
    assert [row[0] for row in await conn.fetch("select affected from rota.audit order by audit_id")] == [3, 2, 0]
    assert (
        await conn.fetchval("select count(*) from rota.job_runs where outcome = 'discarded' and note like '%: old'")
        == 5
    )
