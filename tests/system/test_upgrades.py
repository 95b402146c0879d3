"""Versions side by side: which daemon starts on which schema, and migrations while daemons work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import asyncpg
import pytest

from command_line import Shell, running_command
from rota.db import lock_waiting, sql
from rota.db import migrate as module
from rota.embedded import find_bindir
from rota.errors import DatabaseUnusable
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database, Server

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.works")
async def works(job): ...
"""


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database, with an app in its folder."""
    (tmp_path / "shop.py").write_text(APP)
    return Shell(tmp_path, {"DATABASE_URL": database.dsn, "ROTA_LOG_FORMAT": "json"})


async def _pretend_newer_schema(conn: Connection[Record], *, oldest_compatible: int) -> None:
    """Change rota.meta as a later version's migration would."""
    await conn.execute("insert into rota.migrations values ($1, '9999_later', 'sum')", module.VERSION + 1)
    await conn.execute(
        "update rota.meta set schema_version = $1, oldest_compatible = $2", module.VERSION + 1, oldest_compatible
    )


async def test_an_older_daemon_starts_on_a_newer_compatible_schema(rota: Shell, conn: Connection[Record]) -> None:
    """During an upgrade, older daemons may restart, and deployments run `rota migrate` again."""
    await _pretend_newer_schema(conn, oldest_compatible=module.VERSION)
    job_id = await conn.fetchval("insert into rota.jobs (handler) values ('shop.works') returning job_id")

    migrated = await rota("migrate", "--json")
    checked = await rota("migrate", "--check")
    ran = await rota("run", "--app", "shop:app", "--until-idle")

    assert (migrated.code, checked.code, ran.code) == (0, 0, 0), migrated.err + ran.err
    assert migrated.json == {"applied": [], "version": module.VERSION + 1}
    assert "but compatible" in (await rota("migrate")).out
    assert await conn.fetchval("select outcome from rota.job_runs where job_id = $1", job_id) == "succeeded"

    # It must not set the rights of objects that it does not know.
    roles = await rota("migrate", "--roles")
    assert roles.code == 3
    assert "newer rota" in roles.err


async def test_an_older_daemon_refuses_to_start_on_an_incompatible_schema(
    rota: Shell, conn: Connection[Record]
) -> None:
    await _pretend_newer_schema(conn, oldest_compatible=module.VERSION + 1)
    await conn.execute("insert into rota.jobs (handler) values ('shop.works')")
    for command in (["run", "--app", "shop:app"], ["status"], ["migrate"], ["migrate", "--check"]):
        result = await rota(*command)
        assert result.code == 3
        assert f"version {module.VERSION + 1}" in result.err
        assert "upgrade rota" in result.err
    assert await conn.fetchval("select sum(attempt) from rota.jobs") == 0


async def test_a_newer_daemon_does_not_start_before_its_migration(rota: Shell, conn: Connection[Record]) -> None:
    await conn.execute("update rota.meta set schema_version = $1", module.VERSION - 1)
    await conn.execute("insert into rota.jobs (handler) values ('shop.works')")
    result = await rota("run", "--app", "shop:app")
    assert result.code == 3
    assert f"this rota needs {module.VERSION}: run `rota migrate`" in result.err
    assert await conn.fetchval("select sum(attempt) from rota.jobs") == 0


async def test_a_schema_made_by_other_migrations_is_rejected(rota: Shell, conn: Connection[Record]) -> None:
    """The migrations were renumbered before the first release, and the message says how to start again."""
    await conn.execute("update rota.migrations set name = '0001_ground', checksum = 'sum' where version = 1")
    for options in ((), ("--check",)):
        result = await rota("migrate", *options)
        assert result.code == 3
        assert "migration 1 of this database is 0001_ground" in result.err
        assert "drop schema rota cascade" in result.err


def test_a_migration_that_breaks_older_daemons_declares_it() -> None:
    """The mark raises oldest_compatible; without it, the previous release keeps running."""
    breaking = [number for number, text in enumerate(sql.MIGRATIONS.values(), 1) if f"\n{module.BREAKING}" in text]
    assert breaking[-1] == module.OLDEST_COMPATIBLE


@pytest.fixture
def later_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that needs an exclusive lock on rota.jobs."""
    text = "alter table rota.jobs add column later integer"
    monkeypatch.setattr(module, "MIGRATIONS", {**sql.MIGRATIONS, "9999_later": text})
    monkeypatch.setattr(module, "VERSION", len(sql.MIGRATIONS) + 1)
    monkeypatch.setattr(lock_waiting, "RETRY_SECONDS", 0.3)


@pytest.mark.usefixtures("later_migration")
async def test_a_migration_that_waits_for_a_lock_lets_jobs_run(
    rota: Shell, database: Database, conn: Connection[Record]
) -> None:
    """Claims queue behind a waiting exclusive lock.

    The migration therefore waits for half a second at a time, and lets jobs run in between.
    """
    with running_command(rota, "run", "--app", "shop:app") as (process, output):
        await eventually(lambda: "node.started" in output(), within=30, what="the daemon")
        async with database.connect() as report:
            transaction = report.transaction()
            await transaction.start()
            await report.execute("select count(*) from rota.jobs")
            async with asyncio.TaskGroup() as group:
                migration = group.create_task(module.migrate(database.dsn))

                async def is_waiting() -> bool:
                    return bool(
                        await conn.fetchval(
                            "select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock' "
                            "and relation = 'rota.jobs'::regclass)"
                        )
                    )

                for _ in range(3):
                    await eventually(is_waiting, what="the migration's try")
                    job_id = await conn.fetchval(
                        "insert into rota.jobs (handler) values ('shop.works') returning job_id"
                    )

                    async def has_ended(job_id: int = job_id) -> bool:
                        return bool(
                            await conn.fetchval("select exists (select from rota.job_runs where job_id = $1)", job_id)
                        )

                    await eventually(has_ended, within=8, what="the job's end")
                assert not migration.done()
                await transaction.rollback()
        assert list(migration.result().applied) == ["9999_later"]

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.usefixtures("later_migration")
async def test_a_migration_that_never_gets_its_lock_gives_up_and_changes_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_waiting, "LOCK_SECONDS", 0.5)
    async with database.connect() as report:
        async with report.transaction():
            await report.execute("select count(*) from rota.jobs")
            with pytest.raises(DatabaseUnusable, match="9999_later waits for a lock"):
                await module.migrate(database.dsn)
        with pytest.raises(asyncpg.UndefinedColumnError):
            await report.execute("select later from rota.jobs")
        assert await report.fetchval("select max(version) from rota.migrations") == len(sql.MIGRATIONS)


INDEX_MIGRATION = """-- no transaction
-- A comment with a semicolon;
drop index concurrently if exists rota.later_idx;

create unique index concurrently later_idx
    on rota.jobs (handler);
"""


@pytest.fixture
def index_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that cannot run in a transaction, followed by one that can."""
    more = {"9998_index": INDEX_MIGRATION, "9999_later": "alter table rota.jobs add column later integer;"}
    monkeypatch.setattr(module, "MIGRATIONS", {**sql.MIGRATIONS, **more})
    monkeypatch.setattr(module, "VERSION", len(sql.MIGRATIONS) + 2)
    monkeypatch.setattr(lock_waiting, "POLL_SECONDS", 0.01)


SELECT_INDEX_IS_VALID = "select indisvalid from pg_index where indexrelid = to_regclass('rota.later_idx')"


@pytest.mark.usefixtures("index_migration")
async def test_a_migration_without_a_transaction_is_resumed_where_it_failed(
    database: Database, conn: Connection[Record]
) -> None:
    """A failed build leaves an invalid index, which the next run drops."""
    before = await conn.fetchval("select count(*) from rota.migrations")
    await conn.execute("insert into rota.jobs (handler) values ('twice'), ('twice')")
    with pytest.raises(asyncpg.UniqueViolationError):
        await module.migrate(database.dsn)
    assert await conn.fetchval(SELECT_INDEX_IS_VALID) is False
    assert await conn.fetchval("select count(*) from rota.migrations") == before

    await conn.execute("delete from rota.jobs")
    migrated = await module.migrate(database.dsn)

    assert list(migrated.applied) == ["9998_index", "9999_later"]
    assert await conn.fetchval(SELECT_INDEX_IS_VALID) is True
    assert await conn.fetchval("select schema_version from rota.meta") == module.VERSION
    assert await module.list_missing(database.dsn) == []


@pytest.mark.usefixtures("index_migration")
async def test_concurrent_migrations_do_not_block_a_concurrent_index_build(
    database: Database, conn: Connection[Record]
) -> None:
    """The build waits for all snapshots, so the second process must not wait for its lock inside a statement."""
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(module.migrate(database.dsn)) for _ in range(3)]
    assert sorted(len(run.result().applied) for run in runs) == [0, 0, 2]
    assert await conn.fetchval(SELECT_INDEX_IS_VALID) is True


@pytest.mark.usefixtures("index_migration")
async def test_the_printed_sql_runs_a_concurrent_index_build_outside_a_transaction(server: Server) -> None:
    """The row that marks it as applied comes after it."""
    name = f"rota_printed_{os.getpid()}"
    root = await asyncpg.connect(server.dsn)
    try:
        await root.execute(f"create database {name}")
        psql = [str(find_bindir() / "psql"), "-v", "ON_ERROR_STOP=1", "-qXf", "-", server.dsn_for(name)]
        migrated = await asyncio.to_thread(
            subprocess.run, psql, input=module.script(), capture_output=True, text=True, check=False
        )
        assert migrated.returncode == 0, migrated.stderr
        assert await module.list_missing(server.dsn_for(name)) == []
    finally:
        await root.execute(f"drop database if exists {name} with (force)")
        await root.close()
