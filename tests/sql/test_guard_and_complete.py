"""rota.guard and rota.complete: what a stale holder does in its own transaction doesn't count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

from factories import NODE, make_job, make_running_job, state_of, wait_until_blocked

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


async def test_guard_takes_equal_and_higher_tokens_and_refuses_lower_ones(conn: Connection[Record]) -> None:
    """Effects on a resource happen in the order of the claims."""
    await conn.execute("select setval('rota.fence_tokens', 10)")
    for token in (4, 4, 7):
        await conn.execute("select rota.guard('order:1', $1)", token)
    with pytest.raises(asyncpg.PostgresError, match="stale") as refused:
        await conn.execute("select rota.guard('order:1', 6)")
    assert refused.value.sqlstate == "RT001"
    await conn.execute("select rota.guard('order:2', 6)")
    assert await conn.fetchval("select token from rota.guards where resource = 'order:1'") == 7


@pytest.mark.parametrize("token", [11, 0, -1, None, 2**63 - 1])
async def test_guard_refuses_a_token_that_was_never_issued(conn: Connection[Record], token: int | None) -> None:
    """One wrong number would lock the resource against every real claim to come."""
    await conn.execute("select setval('rota.fence_tokens', 10)")
    with pytest.raises(asyncpg.PostgresError, match="never issued") as refused:
        await conn.execute("select rota.guard('order:1', $1)", token)
    assert refused.value.sqlstate == "RT006"
    assert await conn.fetchval("select count(*) from rota.guards") == 0


async def test_before_the_first_claim_no_token_has_been_issued(conn: Connection[Record]) -> None:
    """A fresh sequence says 1 already, without ever having given it out."""
    await conn.execute("select setval('rota.fence_tokens', 1, false)")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.guard('order:1', 1)")
    assert refused.value.sqlstate == "RT006"


@pytest.mark.parametrize("resource", ["", None, "a\nb", "x" * 201])
async def test_guard_refuses_a_malformed_resource(conn: Connection[Record], resource: str | None) -> None:
    """The name goes into messages and lists that people read."""
    await conn.execute("select setval('rota.fence_tokens', 10)")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.guard($1, 3)", resource)
    assert refused.value.sqlstate == "RT006"


async def test_a_lower_token_waits_for_the_higher_ones_transaction_and_is_then_refused(
    conn: Connection[Record], database: Database
) -> None:
    """Of two holders at once the later claim wins, also while it hasn't committed yet."""
    await conn.execute("select setval('rota.fence_tokens', 10)")
    async with database.connect() as other, database.connect() as watcher:
        later = other.transaction()
        await later.start()
        await other.execute("select rota.guard('order:1', 9)")
        zombie = asyncio.create_task(conn.execute("select rota.guard('order:1', 8)"))
        await wait_until_blocked(conn, watched_by=watcher)
        await later.commit()
        with pytest.raises(asyncpg.PostgresError) as refused:
            await zombie
    assert refused.value.sqlstate == "RT001"


async def test_a_guard_rolled_back_is_forgotten(conn: Connection[Record], database: Database) -> None:
    """What didn't happen orders nothing."""
    await conn.execute("select setval('rota.fence_tokens', 10)")
    async with database.connect() as other, database.connect() as watcher:
        later = other.transaction()
        await later.start()
        await other.execute("select rota.guard('order:1', 9)")
        earlier = asyncio.create_task(conn.execute("select rota.guard('order:1', 8)"))
        await wait_until_blocked(conn, watched_by=watcher)
        await later.rollback()
        await earlier
    assert await conn.fetchval("select token from rota.guards") == 8


async def test_complete_settles_as_succeeded_in_the_callers_transaction(
    conn: Connection[Record], database: Database
) -> None:
    """Effect and completion commit together, or neither does."""
    job_id, token = await make_running_job(conn, unique_key="k")
    await conn.execute("insert into rota.cancel_requests (job_id, requested_by) values ($1, 'someone')", job_id)
    async with database.connect() as other:
        undone = other.transaction()
        await undone.start()
        await other.execute("select rota.complete($1, $2)", job_id, token)
        await undone.rollback()
    assert await state_of(conn, job_id) == "running"
    await conn.execute("select rota.complete($1, $2, '{\"rows\": 3}')", job_id, token)
    run = await conn.fetchrow(
        "select outcome, attempts, fence_token, node, unique_key, result, note from rota.job_runs"
    )
    assert run is not None
    assert tuple(run) == ("succeeded", 1, token, NODE, "k", '{"rows": 3}', None)
    assert await conn.fetchval("select started_at <= finished_at from rota.job_runs")
    assert await conn.fetchval("select count(*) from rota.jobs") == 0
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0


async def test_complete_refuses_every_claim_but_the_present_one(conn: Connection[Record]) -> None:
    """A zombie, a job that waits for its retry under the same token, a job completed by this very token: all stale."""
    job_id, token = await make_running_job(conn)
    waiting = (await make_job(conn, attempt=1)).job_id
    waiting_token = await conn.fetchval("select fence_token from rota.jobs where job_id = $1", waiting)
    for job, claim in ((job_id, token - 1), (job_id, None), (None, token), (waiting, waiting_token)):
        with pytest.raises(asyncpg.PostgresError, match="stale") as refused:
            await conn.execute("select rota.complete($1, $2)", job, claim)
        assert refused.value.sqlstate == "RT001"
    await conn.execute("select rota.complete($1, $2)", job_id, token)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select rota.complete($1, $2)", job_id, token)
    assert refused.value.sqlstate == "RT001"
    assert await conn.fetchval("select count(*) from rota.job_runs") == 1


async def test_complete_that_waits_for_the_reaper_is_refused_afterwards(
    conn: Connection[Record], database: Database
) -> None:
    """The token is judged on the row as it is under the lock: reaped means stale."""
    job_id, token = await make_running_job(conn)
    async with database.connect() as other, database.connect() as watcher:
        reaper = other.transaction()
        await reaper.start()
        await other.execute(
            "update rota.jobs set state = 'scheduled', leased_by = null, lease_expires_at = null where job_id = $1",
            job_id,
        )
        zombie = asyncio.create_task(conn.execute("select rota.complete($1, $2)", job_id, token))
        await wait_until_blocked(conn, watched_by=watcher)
        await reaper.commit()
        with pytest.raises(asyncpg.PostgresError) as refused:
            await zombie
    assert refused.value.sqlstate == "RT001"
    assert await state_of(conn, job_id) == "due"


async def test_complete_survives_a_heartbeat_in_flight(conn: Connection[Record], database: Database) -> None:
    """A lease extended meanwhile is still this claim's."""
    job_id, token = await make_running_job(conn)
    async with database.connect() as other, database.connect() as watcher:
        beat = other.transaction()
        await beat.start()
        await other.execute("update rota.jobs set lease_expires_at = now() + interval '60 s' where job_id = $1", job_id)
        done = asyncio.create_task(conn.execute("select rota.complete($1, $2)", job_id, token))
        await wait_until_blocked(conn, watched_by=watcher)
        await beat.commit()
        await done
    assert await state_of(conn, job_id) == "succeeded"


async def test_complete_refuses_a_large_result_and_the_job_runs_on(conn: Connection[Record]) -> None:
    """The refusal says what to do, and doesn't print the result."""
    job_id, token = await make_running_job(conn)
    with pytest.raises(asyncpg.PostgresError, match="8 KiB") as refused:
        await conn.execute("select rota.complete($1, $2, to_jsonb(repeat('x', 8191)))", job_id, token)
    assert refused.value.sqlstate == "RT006"
    assert "xxx" not in f"{refused.value}{refused.value.detail}{refused.value.hint}"
    await conn.execute("select rota.complete($1, $2, to_jsonb(repeat('x', 8190)))", job_id, token)


async def test_functions_that_run_as_their_owner_pin_the_search_path_and_public_may_call_none(
    conn: Connection[Record],
) -> None:
    """A definer function without a search path runs whatever object of that name the caller has put in front."""
    loose = await conn.fetch(
        """
        select p.oid::regprocedure::text from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace and p.prosecdef
          and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)
        """
    )
    assert [row[0] for row in loose] == []
    open_to_all = await conn.fetch(
        """
        select p.oid::regprocedure::text
        from pg_proc as p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
        where p.pronamespace = 'rota'::regnamespace and a.grantee = 0
        """
    )
    assert [row[0] for row in open_to_all] == []
