"""Lost connections and server restarts: every job ends exactly once, and the daemon recovers by itself."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import rota
from in_process_daemons import failed_attempts, final_outcome, gated_app, insert_job, run_node, wait_for_claim
from role_logins import dsn_for_login
from rota.db.pool import connection
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection, Record

    from servers import Database, DurableServer

KILL_ROTA_CONNECTIONS = """
select count(pg_terminate_backend(pid)) from (
    select pid from pg_stat_activity
    where datname = current_database() and application_name like 'rota %' and pid <> pg_backend_pid()
) as theirs
"""


async def test_jobs_end_exactly_once_while_connections_are_killed_again_and_again(
    database: Database, conn: Connection[Record]
) -> None:
    app = rota.App("killed")
    await conn.execute("create table public.effects (job_id bigint)")

    @app.handler("plain")
    async def plain(job: rota.Job[Any]) -> int:
        await asyncio.sleep(0)
        return job.job_id

    @app.handler("thread")
    def thread(job: rota.SyncJob[Any]) -> int:
        return job.job_id

    @app.handler("commit", max_attempts=200)
    async def commit(job: rota.Job[Any]) -> None:
        async with job.transaction() as own_conn:
            await own_conn.execute("insert into public.effects values ($1)", job.job_id)

    async def count_outcomes() -> dict[str, int]:
        rows = await conn.fetch(
            "select outcome, count(*) as n from rota.job_runs group by 1 "
            "union all select 'dead: ' || reason, count(*) from rota.dead_letters group by 1"
        )
        return {each["outcome"]: each["n"] for each in rows}

    async with (
        run_node(database.dsn, app, queues="default:20") as node,
        run_node(database.dsn, app, queues="default:20") as other_node,
    ):
        inserted = 0
        for turn in range(25):
            async with conn.transaction():
                for handler in ("plain", "thread", "commit") * 4:
                    options = {"max_attempts": 200, "backoff_base": "interval '10 milliseconds'"}
                    await insert_job(conn, handler, **options, backoff_cap="interval '100 milliseconds'")
                    inserted += 1
            await conn.fetchval(KILL_ROTA_CONNECTIONS)
            await other_node.wait_for_turns("trust", 1) if turn % 2 else await node.wait_for_turns("trust", 1)

        async def is_empty() -> bool:
            return not await conn.fetchval("select count(*) from rota.jobs")

        await eventually(is_empty, within=40, what="the end of all jobs")
        assert node.crash is None
        assert other_node.crash is None
        assert await count_outcomes() == {"succeeded": inserted}
        assert await conn.fetchval("select count(distinct job_id) from rota.job_runs") == inserted
        assert await conn.fetchval("select count(*) - count(distinct job_id) from public.effects") == 0
        assert await conn.fetchval("select count(*) from public.effects") == inserted // 3

        counted = sum(
            each.metric("rota_settled_total", queue="default", handler=handler, settlement="succeeded")
            for each in (node, other_node)
            for handler in ("plain", "thread", "commit")
        )
        assert counted <= inserted


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_b67_a_job_that_outlives_a_restart_of_the_database_keeps_its_attempt(
    durable_server: Callable[..., DurableServer], how: str
) -> None:
    """The lease is stored in the job's row, and the node extends it over a new connection."""
    server = durable_server()
    app = rota.App("restart")
    go = asyncio.Event()
    calls: list[int] = []

    @app.handler("wait")
    async def wait(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        await go.wait()

    async with run_node(server.dsn, app, lease__duration="6s") as node:
        conn = await asyncpg.connect(server.dsn)
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        await conn.close()
        if how == "kill":
            server.kill()
            # An outage of several failures: the pause between attempts must stay shorter than the lease.
            await node.wait_for_event("service.failed", service="dispatcher", failures=3)
            server.start()
        else:
            server.restart()
        beats = len(node.events_named("leases.extended"))
        await node.wait_for_event("leases.extended", times=beats + 1)
        conn = await asyncpg.connect(server.dsn)
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert calls == [1]
        assert await failed_attempts(conn, job_id) == []
        assert not node.events_named("lease.lost")

        later = await insert_job(conn, "wait")
        assert await final_outcome(conn, later, within=20) == "succeeded"

        await conn.close()
        assert node.crash is None


async def test_b67_a_job_that_ends_while_the_database_is_down_is_settled_once(
    durable_server: Callable[..., DurableServer],
) -> None:
    """The node keeps the outcome and the slot until the database is back."""
    server = durable_server()
    app = rota.App("mid-settle")
    go = asyncio.Event()
    calls: list[int] = []

    @app.handler("wait")
    async def wait(job: rota.Job[Any]) -> str:
        calls.append(job.attempt)
        await go.wait()
        return "done"

    async with run_node(server.dsn, app, lease__duration="6s") as node:
        conn = await asyncpg.connect(server.dsn)
        jobs = [await insert_job(conn, "wait") for _ in range(5)]
        for job_id in jobs:
            await wait_for_claim(conn, job_id)
        await conn.close()
        server.stop()
        go.set()
        await node.wait_for_event("service.failed", service="settle", times=2)
        assert not node.daemon.readiness().draining
        server.start()
        conn = await asyncpg.connect(server.dsn)
        for job_id in jobs:
            assert await final_outcome(conn, job_id) == "succeeded"
            assert await failed_attempts(conn, job_id) == []
        await conn.close()
        assert node.crash is None

    assert calls == [1] * 5


async def test_a_daemon_without_a_database_still_stops_within_its_limits(
    durable_server: Callable[..., DurableServer],
) -> None:
    """Unwritten outcomes are left to the leases."""
    server = durable_server()
    app = rota.App("away")
    go = asyncio.Event()

    @app.handler("wait")
    async def wait(_: rota.Job[Any]) -> None:
        await go.wait()

    async with run_node(server.dsn, app, drain__timeout="300ms") as node:
        conn = await asyncpg.connect(server.dsn)
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        await conn.close()
        server.stop()
        go.set()
        await node.wait_for_event("service.failed", service="settle")
        node.stop()
        await node.wait_until_stopped(within=15)

        assert node.crash is None


async def test_lock_timeouts_end_no_daemon_and_stop_no_schedule(database: Database, conn: Connection[Record]) -> None:
    """With a lock_timeout for the whole database, a VACUUM FULL or a user's migration causes them."""
    app = rota.App("locked")
    go = asyncio.Event()

    @app.handler("wait")
    async def wait(_job: rota.Job[Any]) -> None:
        await go.wait()

    await conn.execute(f"alter database {database.name} set lock_timeout = '50ms'")
    await conn.execute(
        "select rota.put_schedule(name => 'steady', every => '1 s', handler => 'nobody', overlap => 'allow')"
    )

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "wait")
        await wait_for_claim(conn, job_id)
        async with conn.transaction():
            await conn.execute("lock table rota.jobs in access exclusive mode")
            for service in ("dispatcher", "scheduler", "heartbeat", "reaper"):
                await node.wait_for_event("service.failed", service=service, kind="LockNotAvailableError")
        fires = await conn.fetchval("select count(*) from rota.fires")
        go.set()
        assert await final_outcome(conn, job_id) == "succeeded"
        assert await failed_attempts(conn, job_id) == []
        assert await conn.fetchval("select invalid_reason from rota.schedules") is None

        async def has_fired_again() -> bool:
            return bool(await conn.fetchval("select count(*) from rota.fires") > fires)

        await eventually(has_fired_again, what="the next fire")
        assert node.crash is None


async def test_a_handler_paused_in_an_open_transaction_does_not_block_the_start_of_a_daemon(
    database: Database, conn: Connection[Record]
) -> None:
    """Daemons write the rows of their handlers at the start and once a minute, and skip locked ones."""
    app = rota.App("paused")

    @app.handler("paused", max_attempts=3)
    async def paused(_: rota.Job[Any]) -> None: ...

    @app.handler("plain", max_attempts=3)
    async def plain(_: rota.Job[Any]) -> None: ...

    await conn.execute("insert into rota.handlers (handler) values ('paused'), ('plain')")
    written = "select array_agg(handler order by handler) from rota.handlers where max_attempts = 3"

    async with database.connect() as operator:
        pausing = operator.transaction()
        await pausing.start()
        await operator.execute("select rota.pause_handler('paused')")
        async with run_node(database.dsn, app):
            assert await conn.fetchval(written) == ["plain"]
            await pausing.commit()
            await eventually(
                lambda: conn.fetchval(f"select ({written}) = '{{paused,plain}}'"), what="the row that was locked"
            )


async def test_a_running_job_survives_while_the_server_rejects_new_connections(
    database: Database, conn: Connection[Record]
) -> None:
    """This happens while a password or pg_hba.conf is changed."""
    go, calls = asyncio.Event(), list[int]()
    login = dsn_for_login(database.dsn, "rota_test_refused")
    await conn.execute("create role rota_test_refused login superuser password 'secret'")
    try:
        async with run_node(login, gated_app(go, calls), lease__duration="10s") as node:
            job_id = await insert_job(conn, "wait")
            await wait_for_claim(conn, job_id)
            await conn.execute("alter role rota_test_refused nologin")
            try:
                await conn.fetchval(KILL_ROTA_CONNECTIONS)
                for service in ("dispatcher", "heartbeat", "reaper"):
                    await node.wait_for_event("service.failed", service=service, failures=2)
            finally:
                await conn.execute("alter role rota_test_refused login")
            go.set()
            assert await final_outcome(conn, job_id) == "succeeded"
            assert calls == [job_id]
            assert node.crash is None
    finally:
        await conn.execute("drop role rota_test_refused")


async def test_a_statement_without_an_answer_in_time_ends_on_the_server(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """It would keep its locks, and its repetitions would take one core each."""
    with pytest.raises(TimeoutError):
        async with connection(pool) as db:
            await db.execute("select pg_sleep(60)", timeout=0.1)
    running = "select count(*) from pg_stat_activity where query = 'select pg_sleep(60)' and state = 'active'"
    await eventually(lambda: conn.fetchval(f"select ({running}) = 0"), within=5)


@pytest.mark.parametrize(
    ("take_away", "give_back"),
    [
        ("alter schema rota rename to rota_away", "alter schema rota_away rename to rota"),
        ("revoke usage on schema rota from rota_test_refused", "grant usage on schema rota to rota_test_refused"),
        ("revoke all on rota.jobs from rota_test_refused", "grant all on rota.jobs to rota_test_refused"),
        (
            "revoke execute on function rota.is_duration from rota_test_refused",
            "grant execute on function rota.is_duration to rota_test_refused",
        ),
    ],
    ids=["schema", "rights on the schema", "rights on the jobs", "rights on a function"],
)
async def test_a_running_job_survives_while_the_schema_or_its_rights_are_missing(
    database: Database, conn: Connection[Record], take_away: str, give_back: str
) -> None:
    """This happens while a backup is restored or rights are granted again."""
    go, calls = asyncio.Event(), list[int]()
    login = dsn_for_login(database.dsn, "rota_test_refused")
    await conn.execute("create role rota_test_refused login password 'secret'")
    await conn.execute(
        "grant usage on schema rota to rota_test_refused;"
        "grant all on all tables in schema rota to rota_test_refused;"
        "grant all on all sequences in schema rota to rota_test_refused;"
        "grant all on all functions in schema rota to rota_test_refused"
    )
    await conn.execute("select rota.put_schedule(name => 's', every => '1 s', handler => 'nobody', overlap => 'allow')")
    try:
        async with run_node(login, gated_app(go, calls), lease__duration="10s") as node:
            job_id = await insert_job(conn, "wait")
            await wait_for_claim(conn, job_id)
            await conn.execute(take_away)
            try:
                await node.wait_for_event("service.failed", service="scheduler", failures=2)
            finally:
                await conn.execute(give_back)
            go.set()
            assert await final_outcome(conn, job_id) == "succeeded"
            assert calls == [job_id]
            assert await conn.fetchval("select invalid_reason from rota.schedules") is None
            assert node.crash is None
    finally:
        await conn.execute("drop owned by rota_test_refused")
        await conn.execute("drop role rota_test_refused")


async def test_a_day_is_24_hours_whatever_timezone_the_database_has(
    database: Database, conn: Connection[Record]
) -> None:
    """PostgreSQL adds days in the zone of the session. One of the three spans always crosses a clock change."""
    app = rota.App("days")

    @app.handler("wait")
    async def wait(job: rota.Job[int]) -> None:
        raise rota.Snooze(after=timedelta(days=job.payload))

    await conn.execute(f"alter database {database.name} set timezone = 'Europe/Berlin'")
    await conn.execute("set timezone = 'Europe/Berlin'")

    async with run_node(database.dsn, app):
        for days in (100, 200, 300):
            job_id = await insert_job(conn, "wait", str(days))
            await conn.fetchval(
                "select rota.put_schedule(name => $1, handler => 'nobody', every => '1 s', start_within => $2)",
                f"within {days}",
                timedelta(days=days),
            )

            async def is_snoozed(job_id: int = job_id) -> Any:
                return await conn.fetchval("select releases = 1 from rota.jobs where job_id = $1", job_id)

            await eventually(is_snoozed, what="the snooze")
            waiting = await conn.fetchval(
                "select extract(epoch from run_at - now())::float8 from rota.jobs where job_id = $1", job_id
            )
            assert abs(waiting - days * 86400) < 60

        async def all_have_fired() -> Any:
            return await conn.fetchval("select count(*) = 3 from rota.jobs where handler = 'nobody'")

        await eventually(all_have_fired, what="their first fires")
        for name, within in await conn.fetch(
            "select name, extract(epoch from start_by - run_at)::float8 from rota.jobs join rota.schedules using (schedule_id)"
        ):
            assert abs(within - int(name.split()[1]) * 86400) < 60
        await conn.execute(
            "select rota.backfill_schedule(name, array[date_trunc('second', created_at) - interval '1 year']) from rota.schedules"
        )
        for name, within in await conn.fetch(
            "select name, extract(epoch from start_by - run_at)::float8 from rota.jobs join rota.schedules using (schedule_id) "
            "where scheduled_for < now() - interval '300 days'"
        ):
            assert abs(within - int(name.split()[1]) * 86400) < 60


async def test_a_serializable_default_isolation_causes_no_errors(database: Database, conn: Connection[Record]) -> None:
    """In that isolation level, statements that meet at a row would fail instead of reading it again."""
    app = rota.App("isolated")

    @app.handler("plain")
    async def plain(_job: rota.Job[Any]) -> None:
        return

    await conn.execute(f"alter database {database.name} set default_transaction_isolation = 'serializable'")
    nodes = [run_node(database.dsn, app, queues="default:20") for _ in range(3)]

    async with nodes[0] as node, nodes[1] as other_node, nodes[2] as third_node:
        for _ in range(10):
            await conn.execute("insert into rota.jobs (handler) select 'plain' from generate_series(1, 100)")

        async def is_empty() -> bool:
            return not await conn.fetchval("select count(*) from rota.jobs")

        await eventually(is_empty, within=40, what="the end of all jobs")
        for each in (node, other_node, third_node):
            assert not each.events_named("service.failed", kind="SerializationError")
