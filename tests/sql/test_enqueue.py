"""rota.enqueue: what is said of a job that was inserted, or found, is true."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from factories import make_job, make_running_job, state_of, wait_until_blocked
from rota.db.sql import SQL

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

ENQUEUE = "select job_id, created from rota.enqueue(handler => 'h', unique_key => 'k', on_conflict => $1)"


async def test_a_bare_call_inserts_a_job_with_all_defaults(conn: Connection[Record]) -> None:
    """A name is all that must be given; everything else has the default that a plain INSERT gives."""
    made = await conn.fetchrow("select * from rota.enqueue('h')")
    assert made is not None
    assert made["created"] is True
    job = await conn.fetchrow("select * from rota.jobs where job_id = $1", made["job_id"])
    assert job is not None
    assert (job["queue"], job["priority"], job["payload"], job["state"]) == ("default", 5, "{}", "scheduled")
    assert job["run_at"] == job["scheduled_for"] == job["created_at"]
    assert job["created_by"] == await conn.fetchval("select session_user::text")


async def test_every_public_column_is_an_argument_and_arrives(conn: Connection[Record]) -> None:
    """A column that the function forgot would be lost without a word."""
    job_id = await conn.fetchval(
        """
        select job_id from rota.enqueue(handler => 'h', payload => '[1]', queue => 'q', run_at => '2030-01-01 00:00+00',
            priority => 1, unique_key => 'u', on_conflict => null, max_attempts => 2, backoff_base => '3 s',
            backoff_cap => '4 s', retry_for => '5 s', timeout => '6 s', lease => '7 s', delivery => 'at_most_once',
            start_by => '2031-01-01 00:00+00', idempotency_key => 'i', meta => '{"m": 1}')
        """
    )
    job = await conn.fetchrow("select * from rota.jobs where job_id = $1", job_id)
    assert job is not None
    expected = {
        "handler": "h", "payload": "[1]", "queue": "q", "run_at": datetime(2030, 1, 1, tzinfo=UTC), "priority": 1,
        "unique_key": "u", "max_attempts": 2, "backoff_base": timedelta(seconds=3), "backoff_cap": timedelta(seconds=4),
        "retry_for": timedelta(seconds=5), "timeout": timedelta(seconds=6), "lease": timedelta(seconds=7),
        "delivery": "at_most_once", "start_by": datetime(2031, 1, 1, tzinfo=UTC), "idempotency_key": "i",
        "meta": '{"m": 1}', "scheduled_for": datetime(2030, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    assert {name: job[name] for name in expected} == expected


async def test_keep_returns_the_live_job_that_has_the_key(conn: Connection[Record]) -> None:
    """Asking twice for the same thing gives one job and its number both times."""
    first = await conn.fetchrow(ENQUEUE, None)
    second = await conn.fetchrow(ENQUEUE, "keep")
    assert first is not None
    assert second is not None
    assert (first["created"], second["created"]) == (True, False)
    assert first["job_id"] == second["job_id"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_error_names_the_live_job_and_not_its_payload(conn: Connection[Record]) -> None:
    """Whoever is refused must learn by whom, and no secret of the other's payload."""
    job_id = (await make_job(conn, unique_key="k")).job_id
    with pytest.raises(asyncpg.PostgresError, match=f"live job {job_id}") as refused:
        await conn.fetchrow(ENQUEUE, "error")
    assert refused.value.sqlstate == "RT005"
    assert refused.value.detail is None


@pytest.mark.parametrize("word", ["skip", "KEEP", ""])
async def test_an_unknown_on_conflict_is_refused(conn: Connection[Record], word: str) -> None:
    """A typing error must not become some policy or other."""
    with pytest.raises(asyncpg.PostgresError, match="keep, replace, queue_one or error") as refused:
        await conn.fetchrow(ENQUEUE, word)
    assert refused.value.sqlstate == "RT006"


@pytest.mark.parametrize("policy", ["keep", "replace", "error"])
async def test_a_key_held_by_a_transaction_that_rolls_back_is_taken(
    conn: Connection[Record], database: Database, policy: str
) -> None:
    """B51: never "already there" because of a job that was never committed."""
    async with database.connect() as other:
        holder = other.transaction()
        await holder.start()
        await other.fetchrow(ENQUEUE, "keep")
        async with database.connect() as watcher:
            waiting = asyncio.create_task(conn.fetchrow(ENQUEUE, policy))
            await wait_until_blocked(conn, watched_by=watcher)
        await holder.rollback()
        made = await waiting
    assert made is not None
    assert made["created"] is True
    assert await state_of(conn, made["job_id"]) == "due"


async def test_a_key_held_by_a_transaction_that_commits_is_found(conn: Connection[Record], database: Database) -> None:
    """B51: the job that is returned exists, and it is the other's."""
    async with database.connect() as other, database.connect() as watcher:
        holder = other.transaction()
        await holder.start()
        first = await other.fetchrow(ENQUEUE, "keep")
        waiting = asyncio.create_task(conn.fetchrow(ENQUEUE, "keep"))
        await wait_until_blocked(conn, watched_by=watcher)
        await holder.commit()
        second = await waiting
    assert first is not None
    assert second is not None
    assert (second["job_id"], second["created"]) == (first["job_id"], False)


async def test_a_key_is_free_once_its_job_has_ended_in_another_transaction(
    conn: Connection[Record], database: Database
) -> None:
    """The lookup after a conflict may find nothing: then the insert is made, and no number invented."""
    job_id, token = await make_running_job(conn, unique_key="k")
    async with database.connect() as other, database.connect() as watcher:
        holder = other.transaction()
        await holder.start()
        await other.execute("select rota.complete($1, $2)", job_id, token)
        waiting = asyncio.create_task(conn.fetchrow(ENQUEUE, "keep"))
        await wait_until_blocked(conn, watched_by=watcher)
        await holder.commit()
        made = await waiting
    assert made is not None
    assert made["created"] is True
    assert made["job_id"] != job_id


async def test_a_key_freed_between_the_insert_and_the_lookup_is_taken(
    conn: Connection[Record], database: Database
) -> None:
    """The insert met a live job, the lookup finds none: the insert is tried again, and NULL is never called a job."""
    job_id, token = await make_running_job(conn, unique_key="k")
    await conn.execute(
        """
        create function pause_here() returns trigger language plpgsql as $$
        begin perform pg_advisory_xact_lock(1); return null; end $$;
        create trigger pause_here after insert on rota.jobs for each statement execute function pause_here();
        """
    )
    async with database.connect() as other, database.connect() as watcher:
        await other.execute("select pg_advisory_lock(1)")
        waiting = asyncio.create_task(conn.fetchrow(ENQUEUE, "keep"))
        await wait_until_blocked(conn, watched_by=watcher)
        await other.execute("select rota.complete($1, $2)", job_id, token)
        await other.execute("select pg_advisory_unlock(1)")
        made = await waiting
    assert made is not None
    assert made["created"] is True
    assert await state_of(conn, made["job_id"]) == "due"


async def test_replace_rewrites_a_job_that_has_never_been_claimed(conn: Connection[Record]) -> None:
    """The newest request wins, under the old number, as if it had been inserted at this moment."""
    await conn.execute("insert into rota.handlers (handler, queue) values ('h', 'lane')")
    job_id = await conn.fetchval(
        "insert into rota.jobs (handler, unique_key, payload, queue, priority, retry_for, run_at) "
        "values ('h', 'k', '{\"n\": 1}', 'q', 1, '1 min', '2026-01-01 00:00+00') returning job_id"
    )
    made = await conn.fetchrow(
        "select * from rota.enqueue('h', '{\"n\": 2}', unique_key => 'k', on_conflict => 'replace')"
    )
    assert made is not None
    assert (made["job_id"], made["created"]) == (job_id, False)
    job = await conn.fetchrow("select *, run_at > now() - interval '1 min' as fresh from rota.jobs")
    assert job is not None
    assert (job["payload"], job["queue"], job["priority"], job["retry_for"]) == ('{"n": 2}', "lane", 5, None)
    assert job["fresh"]
    assert job["scheduled_for"] == job["run_at"]


async def test_replace_leaves_a_running_job_alone(conn: Connection[Record]) -> None:
    """What runs has read its payload: writing another beneath it would be believed and not done."""
    job_id, _ = await make_running_job(conn, unique_key="k")
    before = await conn.fetchrow("select * from rota.jobs")
    made = await conn.fetchrow(
        "select * from rota.enqueue('h', '{\"n\": 2}', unique_key => 'k', on_conflict => 'replace')"
    )
    assert made is not None
    assert (made["job_id"], made["created"]) == (job_id, False)
    assert await conn.fetchrow("select * from rota.jobs") == before


QUEUE_ONE = (
    "select * from rota.put_job('h', $1, unique_key => 'k', on_conflict => 'queue_one', priority => 2, lease => '9 s')"
)


@pytest.mark.parametrize("end", ["complete", "force cancel", "settle"])
async def test_queue_one_runs_the_latest_values_after_the_running_job(conn: Connection[Record], end: str) -> None:
    """However the running job ends, one new job takes its key."""
    job_id, token = await make_running_job(conn, unique_key="k")
    for payload in ('{"n": 2}', '{"n": null}'):
        assert tuple(await conn.fetchrow(QUEUE_ONE, payload) or ()) == (job_id, False, "queued")
    assert await conn.fetchval("select count(*) from rota.jobs") == 1

    if end == "complete":
        await conn.execute("select rota.complete($1, $2)", job_id, token)
    elif end == "force cancel":
        await conn.execute("select rota.cancel($1, force => true)", job_id)
    else:
        node = await conn.fetchval("select leased_by from rota.jobs")
        assert await conn.fetchval(SQL["settle_succeeded"], node, [job_id], [token], [], [])
    columns = "payload, priority, lease, queue, unique_key, state, attempt, created_by = rota.caller()"
    (job,) = await conn.fetch(f"select {columns} from rota.jobs where job_id > $1 and run_at <= now()", job_id)
    assert tuple(job) == ('{"n": null}', 2, timedelta(seconds=9), "default", "k", "scheduled", 0, True)

    assert tuple(await conn.fetchrow(QUEUE_ONE, "[3]") or ())[1:] == (False, "replaced")
    assert await conn.fetchval("select payload from rota.jobs") == "[3]"


async def test_queue_one_refuses_values_that_could_not_be_inserted_later(conn: Connection[Record]) -> None:
    """A failing insert at the end of the running job would keep it from being settled."""
    await make_running_job(conn, unique_key="k")
    for column in ("run_at => '20000-01-01'", "lease => '1 s'", "meta => '[]'", "priority => 10"):
        with pytest.raises(asyncpg.CheckViolationError):
            await conn.execute(f"select rota.put_job('h', unique_key => 'k', on_conflict => 'queue_one', {column})")
    assert await conn.fetchval("select follow_up is null from rota.jobs")


async def test_queue_one_replaces_a_job_that_waits_for_its_retry_and_the_values_queued_behind_it(
    conn: Connection[Record],
) -> None:
    """There is one live job with the key, and it has the latest values."""
    job_id, _ = await make_running_job(conn, unique_key="k")
    await conn.execute(QUEUE_ONE, "[2]")
    await conn.execute("update rota.jobs set state = 'scheduled', leased_by = null, lease_expires_at = null")
    made = await conn.fetchrow(QUEUE_ONE, "[3]")
    assert made is not None
    assert made["outcome"] == "replaced"
    (job,) = await conn.fetch("select job_id, payload from rota.jobs")
    assert tuple(job) == (made["job_id"], "[3]")
    assert await state_of(conn, job_id) == "cancelled"


async def test_replace_puts_a_new_job_in_the_place_of_one_that_waits_for_its_retry(conn: Connection[Record]) -> None:
    """An idempotency key that the world has seen, and a checkpoint, never go with another payload."""
    old = (await make_job(conn, attempt=3, run_at=timedelta(hours=1), unique_key="k")).job_id
    await conn.execute("update rota.jobs set checkpoint = '{\"done\": 3}'")
    made = await conn.fetchrow(
        "select * from rota.enqueue('h', '{\"n\": 2}', unique_key => 'k', on_conflict => 'replace')"
    )
    assert made is not None
    assert made["created"] is True
    assert made["job_id"] != old
    assert await state_of(conn, old) == "cancelled"
    assert await conn.fetchval("select note from rota.job_runs where job_id = $1", old) is not None
    job = await conn.fetchrow("select attempt, checkpoint, payload from rota.jobs")
    assert job is not None
    assert tuple(job) == (0, None, '{"n": 2}')


async def test_replace_waits_for_a_claim_in_flight_and_then_keeps_the_running_job(
    conn: Connection[Record], database: Database
) -> None:
    """The decision is made on the row as it is under the lock, not as it was before."""
    job_id = (await make_job(conn, unique_key="k")).job_id
    async with database.connect() as other, database.connect() as watcher:
        claim = other.transaction()
        await claim.start()
        await other.execute(
            "update rota.jobs set state = 'running', attempt = 1, fence_token = nextval('rota.fence_tokens'), "
            "leased_by = gen_random_uuid(), lease_expires_at = now() + interval '30 s'"
        )
        waiting = asyncio.create_task(
            conn.fetchrow("select * from rota.enqueue('h', '[2]', unique_key => 'k', on_conflict => 'replace')")
        )
        await wait_until_blocked(conn, watched_by=watcher)
        await claim.commit()
        made = await waiting
    assert made is not None
    assert (made["job_id"], made["created"]) == (job_id, False)
    assert await conn.fetchval("select payload from rota.jobs") == "{}"


async def test_a_client_replaces_its_own_job_and_nobody_elses(conn: Connection[Record]) -> None:
    """A shared key is no way to write into the job of another."""
    await conn.execute("begin")  # roles belong to the whole server: this one is rolled back
    await conn.execute(
        """
        create role enqueue_client;
        grant usage on schema rota to enqueue_client;
        grant insert, select on rota.jobs, rota.handlers to enqueue_client;
        grant execute on all functions in schema rota to enqueue_client;
        revoke execute on function rota.cancel_many from enqueue_client;
        """
    )
    await make_job(conn, unique_key="theirs")
    await conn.execute("set local role enqueue_client")
    own = await conn.fetchrow("select * from rota.enqueue('h', '[1]', unique_key => 'own')")
    again = await conn.fetchrow("select * from rota.enqueue('h', '[2]', unique_key => 'own', on_conflict => 'replace')")
    assert own is not None
    assert again is not None
    assert (again["job_id"], again["created"]) == (own["job_id"], False)
    assert await conn.fetchval("select payload from rota.jobs where unique_key = 'own'") == "[2]"
    assert await conn.fetchval("select created_by from rota.jobs where unique_key = 'own'") == "enqueue_client"
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="not yours"):
        await conn.fetchrow("select * from rota.enqueue('h', '[2]', unique_key => 'theirs', on_conflict => 'replace')")
    await conn.execute("rollback")


async def test_concurrent_calls_for_one_key_leave_one_job_and_all_know_it(
    conn: Connection[Record], database: Database
) -> None:
    """However calls interleave, exactly one says "created", and all name the job that is there."""

    async def one() -> tuple[int, bool]:
        async with database.connect() as caller:
            row = await caller.fetchrow(ENQUEUE, "keep")
            assert row is not None
            return row["job_id"], row["created"]

    answers = await asyncio.gather(*(one() for _ in range(12)))
    assert {job_id for job_id, _ in answers} == {await conn.fetchval("select job_id from rota.jobs")}
    assert sum(created for _, created in answers) == 1


@pytest.mark.parametrize(
    "call",
    [
        "rota.enqueue('h', priority => 40000)",
        "rota.enqueue('h', priority => -2147483648, unique_key => 'u', on_conflict => 'replace')",
        "rota.replace_job(1, '{}', null, null, 32768, null, null, null, null, null, null, null, null, null, null, false)",
        "rota.put_schedule('s', 'h', every => '1 hour', priority => 2147483647)",
    ],
)
async def test_a_priority_beyond_its_column_is_refused_by_name(conn: Connection[Record], call: str) -> None:
    """`smallint out of range` names no argument, and comes before any constraint is asked."""
    with pytest.raises(asyncpg.CheckViolationError, match=r"priority must lie between 0 \(first\) and 9 \(last\)"):
        await conn.execute(f"select {call}")


async def test_a_key_beyond_its_index_is_refused_by_name(conn: Connection[Record]) -> None:
    """Each within its own bound, handler and key together may exceed an index entry, but only if they do not compress."""
    handler, key = ("".join(chr(0x10000 + random.randrange(60_000)) for _ in range(length)) for length in (200, 500))
    insert = "insert into rota.jobs (handler, unique_key) values ($1, $2)"
    with pytest.raises(asyncpg.CheckViolationError, match="at most 2600 bytes together, not 2800"):
        await conn.execute(insert, handler, key)
    await conn.execute(insert, handler, key[:450])
