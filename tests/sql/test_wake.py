"""Inserts notify while a dispatcher waits, and cost nobody a NOTIFY otherwise."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from daemon_queries import settle, settlement_row, sql, succeed
from factories import make_job, make_running_job
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection, Record

    from servers import Database

END = "that was all"


@dataclass(slots=True)
class Ear:
    """A listening connection that can hold the lock of a waiting dispatcher."""

    conn: Connection[Record]
    heard: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def wait(self) -> None:
        """Become a dispatcher that waits."""
        await self.conn.execute(sql("await_inserts"))

    async def look(self) -> None:
        """Stop waiting."""
        assert await self.conn.fetchval(sql("ignore_inserts")) is True

    async def so_far(self) -> int:
        """Count what came: notifications arrive in order, so nothing is still to come once our own is here."""
        await self.conn.execute("select pg_notify('rota_wake', $1)", END)
        count = 0
        while await asyncio.wait_for(self.heard.get(), 10) != END:
            count += 1
        return count


@asynccontextmanager
async def _listening(database: Database) -> AsyncIterator[Ear]:
    async with database.connect() as conn:
        ear = Ear(conn)
        await conn.add_listener("rota_wake", lambda *notice: ear.heard.put_nowait(str(notice[3])))
        yield ear


@pytest.fixture
async def ear(database: Database) -> AsyncIterator[Ear]:
    """A connection that listens, and doesn't hold the lock yet."""
    async with _listening(database) as listening:
        yield listening


async def test_an_insert_notifies_only_while_somebody_waits(conn: Connection[Record], ear: Ear) -> None:
    """NOTIFY at every commit would serialise the commits of all who insert."""
    await make_job(conn)
    assert await ear.so_far() == 0
    await ear.wait()
    await make_job(conn)
    assert await ear.so_far() == 1
    await ear.look()
    await make_job(conn)
    assert await ear.so_far() == 0


async def test_one_of_many_that_waits_is_enough(conn: Connection[Record], database: Database, ear: Ear) -> None:
    """The lock is shared; who listens without waiting is woken too, and looks once in vain."""
    async with _listening(database) as another:
        await another.wait()
        await ear.wait()
        await ear.look()
        await make_job(conn)
        assert await another.so_far() == 1
    await make_job(conn)


async def test_a_dispatcher_that_dies_waits_no_longer(conn: Connection[Record], database: Database, ear: Ear) -> None:
    """The lock goes with its session: no row is left that says that somebody waits."""
    async with database.connect() as dying:
        await dying.execute(sql("await_inserts"))
        await conn.fetchval("select pg_terminate_backend($1, 5000)", dying.get_server_pid())
    await make_job(conn)
    assert await ear.so_far() == 0


async def test_a_rolled_back_insert_notifies_nobody(conn: Connection[Record], ear: Ear) -> None:
    """There is nothing to look for."""
    await ear.wait()
    attempt = conn.transaction()
    await attempt.start()
    await make_job(conn)
    await attempt.rollback()
    assert await ear.so_far() == 0


async def test_the_notification_comes_after_the_commit(conn: Connection[Record], ear: Ear) -> None:
    """Who is woken must find the job: told at the insert, it would look before there is anything."""
    await ear.wait()
    async with conn.transaction():
        await make_job(conn)
        assert await ear.so_far() == 0
    assert await ear.so_far() == 1


async def test_a_transaction_of_many_inserts_notifies_once(conn: Connection[Record], ear: Ear) -> None:
    """By the statement, and the server sends equal ones of a transaction once."""
    await ear.wait()
    async with conn.transaction():
        for _ in range(50):
            await make_job(conn)
    assert await ear.so_far() == 1


async def test_a_bulk_insert_notifies_once(conn: Connection[Record], ear: Ear) -> None:
    """100,000 rows are one statement: one try for the lock, one notification."""
    await ear.wait()
    async with conn.transaction():
        await conn.execute("set local track_functions = 'pl'")
        await conn.execute("insert into rota.jobs (handler) select 'h' from generate_series(1, 100000)")
        calls = "select calls from pg_stat_xact_user_functions where funcname = 'wake_dispatchers'"
        assert await conn.fetchval(calls) == 1
    assert await ear.so_far() == 1


async def test_a_transaction_that_is_to_be_prepared_may_do_without(conn: Connection[Record], ear: Ear) -> None:
    """PREPARE TRANSACTION refuses whoever has notified: then polling finds what it brings."""
    await ear.wait()
    async with conn.transaction():
        await conn.execute("set local rota.notify = off")
        await make_job(conn)
        await conn.execute("insert into rota.schedules (name, handler, every) values ('beat', 'h', '1 hour')")
    assert await ear.so_far() == 0
    await make_job(conn)
    assert await ear.so_far() == 1


async def test_nothing_notifies_but_where_it_can_be_done(conn: Connection[Record]) -> None:
    """A server whose queue of notifications is full refuses the whole transaction: see rota.tell()."""
    named = "select proname from pg_proc where pronamespace = 'rota'::regnamespace and prosrc ~ 'pg_notify|notify rota'"
    assert [row["proname"] for row in await conn.fetch(named)] == ["tell"]
    assert [name for name, text in SQL.items() if "pg_notify" in text.lower()] == []


async def test_what_becomes_due_sooner_notifies_and_what_only_runs_does_not(conn: Connection[Record], ear: Ear) -> None:
    """A dispatcher sleeps until the next due instant that it knows: an earlier one has to wake it; the end of a job need not."""
    job_id, _ = await make_job(conn)
    done, failed = await make_running_job(conn), await make_running_job(conn)
    await ear.wait()
    await conn.execute("select rota.reschedule($1)", job_id)
    assert await ear.so_far() == 1
    await succeed(conn, done)
    assert await ear.so_far() == 0
    await settle(conn, settlement_row(failed))
    assert await ear.so_far() == 1


@pytest.mark.parametrize("into", ["jobs", "schedule_definitions"])
async def test_an_insert_that_is_cancelled_leaves_no_lock_behind(
    conn: Connection[Record], database: Database, into: str
) -> None:
    """It would stay as long as the client's session: no dispatcher could wait any more, and every insert would notify."""
    inserting = f"do $$ begin loop insert into rota.{into} (handler) select 'h' where false; end loop; end $$"
    async with database.connect() as client:
        pid = client.get_server_pid()
        for _ in range(200):
            statement = asyncio.ensure_future(client.execute(inserting))
            while not statement.done():
                await conn.execute("select pg_cancel_backend($1)", pid)
            with pytest.raises(asyncpg.QueryCanceledError):
                await statement
            locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = $1"
            assert await conn.fetchval(locks, pid) == 0


async def test_it_works_for_a_plain_client_with_the_documented_grants(
    conn: Connection[Record], database: Database, ear: Ear
) -> None:
    """The trigger runs as its owner: a client needs no privilege for it, and can't forge what it may not write."""
    role = f"rota_test_client_{os.getpid()}"
    public = (
        "handler, payload, queue, priority, run_at, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, "
        "delivery, start_by, unique_key, idempotency_key, meta"
    )
    await conn.execute(
        f"""
        create role {role};
        grant usage on schema rota to {role};
        grant insert ({public}), select (job_id, state, scheduled_for, {public}) on rota.jobs to {role};
        grant select on rota.handlers to {role};
        grant execute on function rota.is_duration to {role};
        """
    )
    try:
        await ear.wait()
        async with database.connect() as client:
            await client.execute(f"set role {role}")
            job_id = await client.fetchval(
                "insert into rota.jobs (handler, unique_key, timeout) values ('h', 'k', '1 min') "
                "on conflict do nothing returning job_id"
            )
            assert await ear.so_far() == 1
            denied = [
                *(f"insert into rota.jobs (handler, {column}) values ('h', default)" for column in FORBIDDEN),
                "update rota.jobs set state = 'running'",
                "delete from rota.jobs",
                "select lease_expires_at from rota.jobs",
                "select rota.wake_dispatchers()",
            ]
            for statement in denied:
                await _refused(client, statement)
        assert await conn.fetchval("select created_by from rota.jobs where job_id = $1", job_id) == role
    finally:
        await conn.execute(f"drop owned by {role}; drop role {role}")


FORBIDDEN = ("state", "fence_token", "created_by", "scheduled_for", "schedule_id", "exclusive", "checkpoint", "attempt")


async def _refused(client: Connection[Record], statement: str, *arguments: Any) -> None:
    with pytest.raises(Exception, match="permission denied"):
        await client.execute(statement, *arguments)
