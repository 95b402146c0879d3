"""Limits under concurrent claims: how many jobs of a key run at once, how many start within an interval, and in which order."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from daemon_queries import LEASE, claim, settle, settlement_row
from factories import make_handler
from rota.db import queries
from rota.db.queries import LimitedSearch
from rota.domain.job import NodeId

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from rota.domain.job import Claim
    from servers import Database

CLAIMERS = 6

LOCK_OF_A_KEY = """(hashtextextended(key_pair.limit_key, 0) & 4095)
                for update skip locked"""
"""Where a claim locks a key before it counts its permits."""


async def claim_limited(conn: Connection[Record], slots: int = 10, *, node: NodeId | None = None) -> list[Claim]:
    """Claim as a dispatcher does that has `slots` free slots for all queues."""
    search = LimitedSearch(
        node=node or NodeId(uuid4()),
        groups={"*": slots},
        own_queues=[],
        handlers=["h"],
        lanes=[],
        cursors={},
        positions={},
        suspects=0,
        total=slots,
        lease=LEASE,
    )
    return (await queries.claim_limited_jobs(conn, search, only=None, skipped=[])).claimed.claims


async def insert_keyed(conn: Connection[Record], key: str, count: int = 1, *, priority: int = 5) -> list[int]:
    """Insert due jobs with a key; return their ids."""
    rows = await conn.fetch(
        "insert into rota.jobs (handler, limit_key, priority, run_at) "
        "select 'h', $1, $3, now() - interval '1 hour' + n * interval '1 s' from generate_series(1, $2::int) as n returning job_id",
        key,
        count,
        priority,
    )
    return [row[0] for row in rows]


async def most_running(database: Database, conn: Connection[Record], *, key: str, jobs: int) -> int:
    """Let several claimers run `jobs` jobs of a key; return the most of them that had an owner at once, by any snapshot."""
    most = 0

    async def run(slots: int) -> None:
        nonlocal most
        node = NodeId(uuid4())
        async with database.connect() as own:
            while await own.fetchval("select exists (select from rota.jobs where limit_key = $1)", key):
                claims = await claim_limited(own, slots, node=node)
                running = await own.fetchval(
                    "select count(*) from rota.jobs where limit_key = $1 and leased_by is not null", key
                )
                most = max(most, running)
                pending = {each.fence_token: each.job_id for each in claims}
                while pending:  # a claim of another session may have a row locked
                    attempts = [(job_id, token) for token, job_id in pending.items()]
                    for token in await queries.settle_succeeded(own, node=node, attempts=attempts, results=[]):
                        del pending[token]

    await insert_keyed(conn, key, jobs)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number in range(CLAIMERS):
            group.create_task(run(1 + number))
    return most


@pytest.fixture(autouse=True)
async def handler(conn: Connection[Record]) -> None:
    """The registered handler of all jobs here."""
    await make_handler(conn, "h")


async def test_no_more_jobs_of_a_key_run_than_its_limit_allows(database: Database, conn: Connection[Record]) -> None:
    """Claims of other sessions commit between the snapshot of a claim and its locks."""
    await conn.execute("select rota.set_limit('k', 3)")
    assert 1 <= await most_running(database, conn, key="k", jobs=300) <= 3


async def test_claims_that_lock_no_key_exceed_its_limit(database: Database, conn: Connection[Record]) -> None:
    """So the test above can fail."""
    source = await conn.fetchval("select pg_get_functiondef('rota.claim_limited_jobs'::regproc)")
    assert LOCK_OF_A_KEY in source
    await conn.execute(source.replace(LOCK_OF_A_KEY, LOCK_OF_A_KEY.splitlines()[0]))
    await conn.execute("select rota.set_limit('k', 3)")
    assert await most_running(database, conn, key="k", jobs=600) > 3


async def test_no_interval_contains_more_starts_than_allowed(database: Database, conn: Connection[Record]) -> None:
    await conn.execute("select rota.set_limit('k', max_starts => 5, per => interval '1 second')")
    await insert_keyed(conn, "k", 14)

    async def run() -> None:
        async with database.connect() as own:
            while await own.fetchval("select exists (select from rota.jobs where state = 'limited')"):
                await claim_limited(own, 3)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(run())
    starts = [row[0] for row in await conn.fetch("select started_at from rota.jobs order by started_at")]
    assert len(starts) == 14
    assert all(later - earlier >= timedelta(seconds=1) for earlier, later in zip(starts, starts[5:], strict=False))


async def test_a_limit_of_one_starts_jobs_in_order(conn: Connection[Record]) -> None:
    """First by priority, then by run_at; and none while another one runs."""
    await conn.execute("select rota.set_limit('k', 1)")
    later = await insert_keyed(conn, "k", 2)
    urgent = await insert_keyed(conn, "k", priority=1)
    ran = []
    while claims := await claim_limited(conn):
        (claimed,) = claims
        ran.append(claimed.job_id)
        assert await claim_limited(conn) == []
        await conn.execute("delete from rota.jobs where job_id = $1", claimed.job_id)
    assert ran == urgent + later


async def test_a_claim_that_knows_no_limits_finds_no_job_with_a_key(conn: Connection[Record]) -> None:
    """That is the claim of the release before, which may run beside this one during an upgrade."""
    await insert_keyed(conn, "k", 3)
    assert await claim(conn, groups={"default": 10}) == []
    assert len(await claim_limited(conn)) == 3


async def test_a_job_starts_only_if_all_of_its_limits_have_a_permit(conn: Connection[Record]) -> None:
    await conn.execute(
        "select rota.set_limit('k', 5), rota.set_limit('handler:h', 3), rota.set_limit('queue:default', 2)"
    )
    await insert_keyed(conn, "k", 9)
    assert len(await claim_limited(conn)) == 2
    await conn.execute("select rota.remove_limit('queue:default')")
    assert len(await claim_limited(conn)) == 1
    await conn.execute("select rota.remove_limit('handler:h')")
    assert len(await claim_limited(conn)) == 2
    await conn.execute("select rota.set_limit('k', 0)")
    assert await claim_limited(conn) == []
    await conn.execute("select rota.remove_limit('k')")
    assert len(await claim_limited(conn)) == 4


async def test_a_hold_ends_by_itself(conn: Connection[Record]) -> None:
    """A key without a limit may be held, too. Other keys go on."""
    await insert_keyed(conn, "held")
    await insert_keyed(conn, "other")
    await conn.execute("select rota.hold_limit('held', clock_timestamp() + interval '300 ms', '429')")
    assert [each.limit_key for each in await claim_limited(conn)] == ["other"]
    async with asyncio.timeout(10):
        while not (claims := await claim_limited(conn)):
            pass
    assert [each.limit_key for each in claims] == ["held"]


async def test_keys_take_turns_by_weight(conn: Connection[Record]) -> None:
    """A tenant with a thousand jobs ahead delays the single job of another one by one turn."""
    await conn.execute("select rota.set_limit('heavy', weight => 3)")
    await insert_keyed(conn, "heavy", 1000)
    for key in ("a", "b"):
        await insert_keyed(conn, key)
    keys = [each.limit_key for each in await claim_limited(conn, 5)]
    assert sorted(map(str, keys)) == ["a", "b", "heavy", "heavy", "heavy"]


@pytest.mark.parametrize("settlement", ["retry", "release"])
async def test_a_job_that_is_put_back_waits_for_its_key_again(conn: Connection[Record], settlement: str) -> None:
    await conn.execute("select rota.set_limit('k', 1)")
    await insert_keyed(conn, "k")
    node = NodeId(uuid4())
    (claimed,) = await claim_limited(conn, node=node)
    await settle(conn, settlement_row((claimed.job_id, claimed.fence_token), settlement, node=node))
    assert await conn.fetchval("select state from rota.jobs") in {"waiting", "limited"}
    await conn.execute("update rota.jobs set run_at = now() - interval '1 s'")
    assert len(await claim_limited(conn)) == 1
