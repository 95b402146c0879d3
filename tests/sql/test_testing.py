"""rota.testing against a database: what it says of jobs is true, and a rollback leaves nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import rota
from drivers import ASYNC, SYNC
from rota.lifecycle.lanes import MAX_LISTED_QUEUES
from rota.testing import (
    Committed,
    Failed,
    Snoozed,
    Succeeded,
    Undecodable,
    assert_enqueued,
    assert_enqueued_sync,
    drain,
    make_job,
    make_sync_job,
    perform,
)

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


@dataclass
class Receipt:
    """A payload."""

    order: int
    copies: int = 1


def shop() -> tuple[rota.App, Any]:
    """Return an app, and the handler that others enqueue."""
    app = rota.App("shop")

    @app.handler("send_receipt", queue="mail", backoff=[timedelta(hours=1)])
    async def send_receipt(job: rota.Job[Receipt]) -> int:
        if job.attempt < job.payload.copies:
            raise ValueError("not yet")
        return job.payload.order

    @app.handler("order")
    async def order(job: rota.Job[dict[str, int]]) -> None:
        async with job.transaction() as conn:
            await send_receipt.enqueue(conn, Receipt(job.payload["id"]))

    @app.handler("thread")
    def thread(job: rota.SyncJob[Any]) -> None:
        job.save_checkpoint({"step": 1})

    @app.handler("snooze")
    async def snooze(_: rota.Job[Any]) -> None:
        raise rota.Snooze(after=timedelta(seconds=5))

    return app, send_receipt


async def test_drain_runs_what_is_due_and_what_that_enqueues_in_the_callers_transaction(
    conn: Connection[Record], database: Database
) -> None:
    """A test of a chain needs no daemon, and its rollback takes everything back."""
    app, _ = shop()
    transaction = conn.transaction()
    await transaction.start()
    await rota.enqueue(conn, "order", {"id": 7})
    await rota.enqueue(conn, "thread")
    await rota.enqueue(conn, "nobodys")
    await rota.enqueue(conn, "send_receipt", {"order": "x"})
    await rota.enqueue(conn, "thread", run_at=datetime(2150, 1, 1, tzinfo=UTC))
    ran = await drain(app, conn)
    assert {(each.handler, type(each.outcome)) for each in ran} == {
        ("order", Committed),
        ("thread", Succeeded),
        ("send_receipt", Undecodable),
        ("send_receipt", Succeeded),
    }
    assert len(ran) == 4
    assert await conn.fetchval("select count(*) from rota.job_runs") == 3
    assert await conn.fetchval("select reason from rota.dead_letters") == "bad_payload"
    await transaction.rollback()
    async with database.connect() as other:
        assert not await other.fetchval("select count(*) from rota.job_runs")


async def test_drain_at_once_waits_for_nothing(conn: Connection[Record]) -> None:
    """Retries and future jobs run one after the other; what goes round in circles is said to."""
    app, send_receipt = shop()
    await send_receipt.enqueue(conn, Receipt(7, copies=3), run_at=datetime(2150, 1, 1, tzinfo=UTC))
    assert await drain(app, conn) == []
    ran = await drain(app, conn, at_once=True)
    assert [(each.attempt, type(each.outcome)) for each in ran] == [(1, Failed), (2, Failed), (3, Succeeded)]
    await rota.enqueue(conn, "snooze")
    (snoozed,) = await drain(app, conn)
    assert isinstance(snoozed.outcome, Snoozed)
    with pytest.raises(AssertionError, match="'snooze'"):
        await drain(app, conn, at_once=True, limit=3)


async def test_drain_comes_to_the_last_of_many_queues(conn: Connection[Record]) -> None:
    """A queue for each tenant is not rare, and what a test leaves waiting looks like a bug of the code under test."""
    app, _ = shop()
    tenants = [f"tenant {n:03}" for n in range(MAX_LISTED_QUEUES + 1)]
    await conn.executemany("insert into rota.jobs (handler, queue) values ('nobodys', $1)", [(t,) for t in tenants])
    await rota.enqueue(conn, "thread", queue=tenants[-1])
    (ran,) = await drain(app, conn)
    assert ran.handler == "thread"


async def test_a_handler_that_cancels_its_own_task_has_failed(conn: Connection[Record]) -> None:
    """As in a daemon: it is the attempt's failure, and drain() does not hang."""
    app = rota.App("suicide")

    @app.handler("suicide")
    async def suicide(_: rota.Job[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    await rota.enqueue(conn, "suicide", {}, max_attempts=1)
    (ran,) = await drain(app, conn)
    assert isinstance(ran.outcome, Failed)
    assert "cancelled its own task" in ran.outcome.text


async def test_drain_takes_a_url_and_refuses_other_drivers(database: Database, conn: Connection[Record]) -> None:
    """Whoever works with another driver commits, and drains by URL; threads then have their transaction, too."""
    app = rota.App("threads")

    @app.handler("effect")
    def effect(job: rota.SyncJob[Any]) -> None:
        with job.transaction() as theirs:
            theirs.execute("select 1")

    await rota.enqueue(conn, "effect")
    (ran,) = await drain(app, database.dsn)
    assert ran.outcome == Committed()
    with pytest.raises(TypeError, match="asyncpg connection or a URL"):
        await drain(app, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("driver", ASYNC)
async def test_what_was_enqueued_is_found_on_any_driver(driver: str, database: Database) -> None:
    """Before it is committed, where the test has it."""
    at = datetime(2030, 1, 1, tzinfo=UTC)
    _, send_receipt = shop()
    async with ASYNC[driver](database.dsn) as theirs:
        made = await send_receipt.enqueue(
            theirs, Receipt(7), run_at=at, timeout=timedelta(seconds=9), meta={"a": 1, "b": 2}
        )
        assert await assert_enqueued(theirs, send_receipt) == [made.job_id]
        await assert_enqueued(
            theirs, "send_receipt", {"order": 7}, run_at=at, timeout=timedelta(seconds=9), meta={"a": 1}
        )
        await assert_enqueued(theirs, send_receipt, Receipt(7), count=1, priority=5)
        await assert_enqueued(theirs, send_receipt, {"order": 8}, count=0)
        await assert_enqueued(theirs, "other", count=0)


@pytest.mark.parametrize("driver", SYNC)
def test_what_was_enqueued_is_found_on_any_blocking_driver(driver: str, database: Database) -> None:
    """The twin."""
    _, send_receipt = shop()
    with SYNC[driver](database.dsn) as theirs:
        made = send_receipt.enqueue_sync(theirs, Receipt(7))
        assert assert_enqueued_sync(theirs, send_receipt, {"order": 7}, queue="default") == [made.job_id]


@pytest.mark.parametrize(
    ("payload", "columns", "count"),
    [({"order": 8}, {}, None), ({}, {"queue": "q"}, None), ({"order": 7}, {}, 2), ({"order": 7, "x": 1}, {}, None)],
)
async def test_what_was_not_enqueued_is_told_with_what_was(
    payload: Any, columns: dict[str, Any], count: int | None, conn: Connection[Record]
) -> None:
    """An assertion that only says no sends people to psql."""
    await rota.enqueue(conn, "send_receipt", {"order": 7})
    with pytest.raises(AssertionError, match=r"'order': 7"):
        await assert_enqueued(conn, "send_receipt", payload, count=count, **columns)
    with pytest.raises(AssertionError, match="none of that handler"):
        await assert_enqueued(conn, "other")


async def test_a_made_up_jobs_transaction_runs_on_the_connection_that_was_lent(
    conn: Connection[Record], database: Database
) -> None:
    """A savepoint in the test's own transaction: the handler's SQL is real, and so is the rollback."""
    await conn.execute("create table effects (n int)")
    async with conn.transaction():
        async with make_job(1, conn=conn).transaction() as theirs:
            await theirs.execute("insert into effects values (1)")
        job = make_job(1, conn=conn)
        with pytest.raises(ValueError, match="no"):  # noqa: PT012
            async with job.transaction() as theirs:
                await theirs.execute("insert into effects values (2)")
                raise ValueError("no")
        assert not job.completed
        assert await conn.fetchval("select array_agg(n) from effects") == [1]
    with psycopg.connect(database.dsn) as blocking, make_sync_job(1, conn=blocking).transaction() as theirs_too:
        theirs_too.execute("insert into effects values (3)")
    app = rota.App("a")

    @app.handler("effect")
    async def effect(job: rota.Job[Any]) -> None:
        async with job.transaction() as theirs:
            await theirs.execute("insert into effects values (4)")

    assert await perform(app, "effect", conn=conn) == Committed()
    assert await rota.inline.call_inline(app, "effect", dsn=database.dsn) == Committed()
    assert await conn.fetchval("select array_agg(n order by n) from effects") == [1, 3, 4, 4]


async def test_drain_ignores_limits_and_finds_the_keys_that_the_sdk_set(conn: Connection[Record]) -> None:
    """A test of an app must not depend on the limits of the database; the keys are what its code decides."""
    app = rota.App("shop")

    @app.handler("mail", limit_key=lambda order: f"to:{order['to']}" if order["to"] else None)
    async def mail(_: rota.Job[dict[str, int]]) -> None: ...

    await conn.execute("select rota.set_limit('*', 0); select rota.set_limit('handler:mail', 0)")
    await mail.enqueue(conn, {"to": 1})
    await mail.enqueue(conn, {"to": 1}, limit_key="x", priority=9)
    assert await mail.enqueue_many(conn, [{"to": 2}, {"to": 0}], priority=9) == 2
    await mail.enqueue(conn, {"to": 3}, limit_key=None, run_at=datetime.now(UTC) + timedelta(days=1))
    (first,) = await assert_enqueued(conn, mail, limit_key="to:1")
    for key in ("x", "to:2"):
        await assert_enqueued(conn, mail, limit_key=key, count=1)
    assert await conn.fetchval("select count(*) from rota.jobs where limit_key is null") == 2
    ran = await drain(app, conn)
    assert (len(ran), ran[0].job_id) == (4, first)
    assert len(await drain(app, conn, at_once=True)) == 1
