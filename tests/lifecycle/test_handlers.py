"""What handlers can do with their job in a running daemon: complete it with any driver, guard, stop, run in a process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import rota
from drivers import ASYNC, SYNC
from in_process_daemons import (
    dead_letter,
    failed_attempts,
    final_outcome,
    insert_job,
    live_row,
    run_node,
    wait_for_claim,
)
from rota.app import find_app
from rota.errors import StaleToken
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


class Rollback(Exception):
    """Raised to leave a transaction without committing it."""


async def _result(conn: Connection[Record], job_id: int) -> Any:
    text = await conn.fetchval("select result from rota.job_runs where job_id = $1", job_id)
    return None if text is None else json.loads(text)


@pytest.mark.parametrize(("kind", "driver"), [*(("async", name) for name in ASYNC), *(("sync", name) for name in SYNC)])
async def test_a_job_completes_exactly_when_the_users_transaction_commits(
    kind: str, driver: str, database: Database, conn: Connection[Record]
) -> None:
    """After a rollback the job is retried."""
    app = rota.App("own")

    async def complete(job: rota.Job[Any]) -> str:
        with suppress(Rollback):
            async with ASYNC[driver](database.dsn) as user_conn:
                await job.guard(user_conn, f"order:{job.attempt}")
                await job.complete(user_conn, {"attempt": job.attempt})
                if job.attempt == 1:
                    raise Rollback
        return "ignored"

    def complete_sync(job: rota.SyncJob[Any]) -> str:
        with suppress(Rollback), SYNC[driver](database.dsn) as user_conn:
            job.guard(user_conn, f"order:{job.attempt}")
            job.complete(user_conn, {"attempt": job.attempt})
            if job.attempt == 1:
                raise Rollback
        return "ignored"

    handler = app.handler("own", backoff=[timedelta(milliseconds=1)])
    handler(complete) if kind == "async" else handler(complete_sync)

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "own")
        assert await final_outcome(conn, job_id) == "succeeded"
    assert await _result(conn, job_id) == {"attempt": 2}
    assert [attempt["error_kind"] for attempt in await failed_attempts(conn, job_id)] == ["NotCommitted"]
    assert [row["resource"] for row in await conn.fetch("select resource from rota.guards")] == ["order:2"]


STEAL_JOB = """
update rota.jobs set fence_token = nextval('rota.fence_tokens'), leased_by = gen_random_uuid() where job_id = $1
"""


@pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy-session"])
async def test_a_stale_token_is_rejected_on_every_driver_and_nothing_is_committed(
    driver: str, database: Database, conn: Connection[Record]
) -> None:
    app = rota.App("stale")
    raised: list[BaseException] = []

    @app.handler("stale")
    async def stale(job: rota.Job[Any]) -> None:
        await conn.execute(STEAL_JOB, job.job_id)
        await conn.execute("select rota.guard('r', last_value) from rota.fence_tokens")
        for write in (
            job.complete,
            lambda user_conn: job.guard(user_conn, "r"),
            lambda user_conn: job.save_checkpoint(1, user_conn),
        ):
            try:
                async with ASYNC[driver](database.dsn) as user_conn:
                    await write(user_conn)
            except StaleToken as error:
                raised.append(error)

    @app.handler("stale_sync")
    def stale_sync(job: rota.SyncJob[Any]) -> None:
        with psycopg.connect(database.dsn) as other:
            other.execute(STEAL_JOB.replace("$1", "%s"), (job.job_id,))
        for write in (job.complete, lambda user_conn: job.save_checkpoint(1, user_conn)):
            try:
                with SYNC[driver](database.dsn) as user_conn:
                    write(user_conn)
            except StaleToken as error:
                raised.append(error)
        try:
            with job.transaction():
                pass
        except StaleToken as error:
            raised.append(error)

    async with run_node(database.dsn, app) as node:
        await insert_job(conn, "stale")
        await node.wait_for_event("write.refused", what="checkpoint")
        await insert_job(conn, "stale_sync")
        await eventually(lambda: len(raised) == 6, what="six refusals")
        assert node.metric("rota_stale_writes_total") >= 6

    assert not await conn.fetchval("select count(*) from rota.job_runs")


async def test_a_threads_transaction_commits_effect_and_completion_together(
    database: Database, conn: Connection[Record]
) -> None:
    await conn.execute("create table effects (job_id int8, attempt int)")
    app = rota.App("threads")

    @app.handler("effect", backoff=[timedelta(milliseconds=1)])
    def effect(job: rota.SyncJob[Any]) -> None:
        with job.transaction(checkpoint={"step": job.attempt}) as user_conn:
            user_conn.execute("insert into effects values (%s, 0)", (job.job_id,))
        assert job.checkpoint == {"step": job.attempt}
        with job.transaction() as user_conn:
            user_conn.execute("insert into effects values (%s, %s)", (job.job_id, job.attempt))
            if job.attempt == 1:
                raise ValueError
        with pytest.raises(RuntimeError, match="only one"), job.transaction():
            pass

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "effect")
        assert await final_outcome(conn, job_id) == "succeeded"
    rows = await conn.fetch("select attempt from effects order by attempt")
    assert [row["attempt"] for row in rows] == [0, 0, 2]


async def test_without_psycopg_a_threads_transaction_fails_and_names_the_package_to_install(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    app = rota.App("threads")

    @app.handler("effect", max_attempts=1)
    def effect(job: rota.SyncJob[Any]) -> None:
        with job.transaction():
            pass

    monkeypatch.setitem(sys.modules, "psycopg", None)

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "effect")
        assert await final_outcome(conn, job_id) == "dead: exhausted"

    assert "pip install 'rota[psycopg]'" in (await dead_letter(conn, job_id))["error"]


async def test_a_handlers_own_backoff_list_is_used_without_jitter(database: Database, conn: Connection[Record]) -> None:
    app = rota.App("backoff")

    @app.handler("fail", backoff=[timedelta(hours=1), timedelta(hours=2)])
    async def fail(_: rota.Job[Any]) -> None:
        raise ValueError

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "fail")
        await node.wait_for_event("job.settled", job_id=job_id, settlement="retried", due_in_s=3600.0)
        await conn.execute("update rota.jobs set run_at = now() where job_id = $1", job_id)
        await node.wait_for_event("job.settled", job_id=job_id, settlement="retried", due_in_s=7200.0)


async def test_middleware_runs_around_each_handler_and_log_records_carry_the_job(
    database: Database, conn: Connection[Record], caplog: pytest.LogCaptureFixture
) -> None:
    app = rota.App("around")
    logger = logging.getLogger("theirs")

    @app.middleware
    async def around(job: rota.Job[Any], call_next: Any) -> Any:
        logger.warning("around %s", job.payload)
        return await call_next(job)

    @app.handler("on_loop")
    async def on_loop(job: rota.Job[Any]) -> None:
        logger.warning("in %s", job.payload)
        await asyncio.sleep(0)
        logger.warning("in %s", job.payload)

    @app.handler("in_thread")
    def in_thread(job: rota.SyncJob[Any]) -> None:
        logger.warning("in %s", job.payload)

    async with run_node(database.dsn, app):
        jobs = {
            number: await insert_job(conn, "on_loop" if number % 2 else "in_thread", str(number))
            for number in range(10)
        }
        for job_id in jobs.values():
            assert await final_outcome(conn, job_id) == "succeeded"
    records = [record for record in caplog.records if record.name == "theirs"]
    assert len(records) == 25

    for record in records:
        number = int(record.message.split()[1])
        assert record.job_id == jobs[number]  # type: ignore[attr-defined]
        assert record.handler == ("on_loop" if number % 2 else "in_thread")  # type: ignore[attr-defined]
        assert (record.queue, record.attempt) == ("default", 1)  # type: ignore[attr-defined]


@pytest.fixture
def processes_app(monkeypatch: pytest.MonkeyPatch) -> rota.App:
    """The app whose handlers run in a process of their own."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    return find_app("handlers_app:app")


async def test_a_handler_in_a_process_returns_its_result_and_logs_with_its_job(
    processes_app: rota.App, database: Database, conn: Connection[Record], capfd: pytest.CaptureFixture[str]
) -> None:
    """The death of a process is a failure like any other."""
    async with run_node(database.dsn, processes_app, reference="handlers_app:app", log__level="info"):
        job_id = await insert_job(conn, "report_process", '{"n": 1}')
        dead = await insert_job(conn, "exit_without_result")
        assert await final_outcome(conn, job_id) == "succeeded"
        assert await final_outcome(conn, dead) == "dead: exhausted"
    result = await _result(conn, job_id)
    assert result.pop("pid") != os.getpid()
    assert result == {"attempt": 1, "payload": {"n": 1}}
    assert (await dead_letter(conn, dead))["error_kind"] == "ProcessDied"

    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "from the child" in line]
    assert [(line["event"], line["job_id"], line["handler"]) for line in lines] == [
        ("from the child", job_id, "report_process")
    ]


async def test_a_handler_in_a_process_gets_the_reason_of_a_stop(
    processes_app: rota.App, database: Database, conn: Connection[Record]
) -> None:
    async with run_node(
        database.dsn, processes_app, reference="handlers_app:app", drain__timeout="0s", drain__grace="10s"
    ) as node:
        job_id = await insert_job(conn, "wait_for_stop")

        async def has_reported() -> bool:
            return (await live_row(conn, job_id))["progress"] is not None

        await wait_for_claim(conn, job_id)
        await eventually(has_reported, what="the child's first report")
        node.stop()
        assert await final_outcome(conn, job_id) == "succeeded"

    assert await _result(conn, job_id) == "drain"


@pytest.mark.parametrize(
    "handler",
    [
        "commit_with_completion",
        "commit_with_completion_async",
        "complete_in_own_transaction",
        "complete_in_own_transaction_async",
    ],
)
async def test_a_process_commits_effect_and_completion_together(
    handler: str, processes_app: rota.App, database: Database, conn: Connection[Record]
) -> None:
    await conn.execute("create table effects (job_id int8)")
    async with run_node(database.dsn, processes_app, reference="handlers_app:app"):
        job_id = await insert_job(conn, handler, json.dumps({"dsn": database.dsn}))
        assert await final_outcome(conn, job_id) == "succeeded"

    assert await conn.fetchval("select job_id from effects") == job_id
    assert await _result(conn, job_id) == (
        {"done": True} if handler.startswith("complete_in_own_transaction") else None
    )
    assert not await failed_attempts(conn, job_id)


SHOW_IDLE_TIMEOUT = "show idle_in_transaction_session_timeout"


@pytest.mark.parametrize("handler", ["commit_steps", "commit_steps_async"])
async def test_a_process_commits_each_step_with_its_checkpoint(
    handler: str, processes_app: rota.App, database: Database, conn: Connection[Record]
) -> None:
    """The isolation is READ COMMITTED whatever the database's default, and a failed step undoes its checkpoint."""
    await conn.execute("create table effects (job_id int8)")
    await conn.execute(f"alter database {database.name} set default_transaction_isolation = 'serializable'")
    async with run_node(database.dsn, processes_app, reference="handlers_app:app"):
        job_id = await insert_job(conn, handler, json.dumps({"dsn": database.dsn}))
        assert await final_outcome(conn, job_id) == "succeeded"
    assert [row["error_kind"] for row in await failed_attempts(conn, job_id)] == ["ValueError", "ValueError"]
    assert await conn.fetchval("select count(*) from effects") == 2, "one step and the last; the second was taken back"


async def test_writes_of_a_process_with_a_stale_token_are_rejected_and_counted(
    processes_app: rota.App, database: Database, conn: Connection[Record]
) -> None:
    """The child has connections of its own, and reports the rejections to the daemon."""
    async with run_node(database.dsn, processes_app, reference="handlers_app:app") as node:
        await insert_job(conn, "write_with_stale_token", json.dumps({"dsn": database.dsn}))
        await node.wait_for_event("write.refused", what="complete")
        await node.wait_for_event("write.refused", what="checkpoint")
        await node.wait_for_event("lease.lost")
        assert node.metric("rota_stale_writes_total") >= 2


async def test_the_idle_timeout_of_a_handlers_transaction_is_the_jobs_lease(
    processes_app: rota.App, database: Database, conn: Connection[Record]
) -> None:
    """A longer timeout would keep locks after the lease has ended. A shorter one would end healthy transactions."""
    app = rota.App("idling")
    app.include(processes_app)

    @app.handler("on the loop")
    async def on_the_loop(job: rota.Job[Any]) -> Any:
        async with job.transaction(checkpoint=1) as user_conn:
            return await user_conn.fetchval(SHOW_IDLE_TIMEOUT)

    @app.handler("in a thread")
    def in_a_thread(job: rota.SyncJob[Any]) -> Any:
        with job.transaction(checkpoint=1) as user_conn:
            [(limit,)] = user_conn.execute(SHOW_IDLE_TIMEOUT)
        return limit

    timeouts = {}

    async with run_node(database.dsn, app, reference="handlers_app:app", lease__duration="7s"):
        for handler in ("on the loop", "in a thread", "show_idle_timeout", "show_idle_timeout_async"):
            own, daemons = (
                await insert_job(conn, handler, lease="interval '90 seconds'"),
                await insert_job(conn, handler),
            )
            assert {await final_outcome(conn, own), await final_outcome(conn, daemons)} == {"succeeded"}
            timeouts[handler] = (await _result(conn, own), await _result(conn, daemons))

    assert set(timeouts.values()) == {("90s", "7s")}, timeouts


CHANGE_SESSION_STATE = """
    set role rota_test_left_behind; set search_path = ''; set statement_timeout = '1min'; listen left_behind;
    create temp table left_behind (); select pg_advisory_lock(1919906913, 77)
"""
READ_SESSION_STATE = """
    select current_user <> session_user, current_setting('search_path') = '', current_setting('statement_timeout') <> '0',
        exists (select from pg_listening_channels()), to_regclass('left_behind') is not null, '[]'::jsonb
"""
COUNT_LEFT_LOCKS = "select count(*) from pg_locks where locktype = 'advisory' and classid = 1919906913 and objid = 77"


async def test_b75_session_state_left_by_a_handler_is_reset_before_the_next_job(
    database: Database, conn: Connection[Record]
) -> None:
    """This covers roles, settings, temporary tables, locks, channels and codecs."""
    app = rota.App("leaves")

    @app.handler("change on the loop")
    async def change_on_the_loop(job: rota.Job[Any]) -> None:
        async with job.transaction() as user_conn:
            await user_conn.execute(CHANGE_SESSION_STATE)
            await user_conn.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)

    @app.handler("change in a thread")
    def change_in_a_thread(job: rota.SyncJob[Any]) -> None:
        with job.transaction() as user_conn:
            user_conn.execute(CHANGE_SESSION_STATE)
            user_conn.row_factory = psycopg.rows.dict_row
            user_conn.cursor_factory = psycopg.ClientCursor

    @app.handler("read on the loop")
    async def read_on_the_loop(job: rota.Job[Any]) -> Any:
        async with job.transaction(checkpoint=1) as user_conn:
            return [list(row) for row in await user_conn.fetch(READ_SESSION_STATE)]

    @app.handler("read in a thread")
    def read_in_a_thread(job: rota.SyncJob[Any]) -> Any:
        with job.transaction(checkpoint=1) as user_conn:
            cursor = user_conn.execute(READ_SESSION_STATE)
            return [type(cursor) is psycopg.Cursor, *cursor.fetchall()]

    await conn.execute("create role rota_test_left_behind superuser")
    try:
        async with run_node(database.dsn, app, database__handler_pool_size=1):
            for place, clean in {
                "on the loop": [[False, False, False, False, False, "[]"]],
                "in a thread": [True, [False, False, False, False, False, []]],
            }.items():
                assert await final_outcome(conn, await insert_job(conn, f"change {place}")) == "succeeded"
                job_id = await insert_job(conn, f"read {place}")
                assert await final_outcome(conn, job_id) == "succeeded"
                assert await _result(conn, job_id) == clean, place
                assert await conn.fetchval(COUNT_LEFT_LOCKS) == 0, place
    finally:
        await conn.execute("drop role rota_test_left_behind")
