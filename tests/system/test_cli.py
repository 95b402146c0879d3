"""The commands as users run them: their output, their effects, and their errors."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from command_line import Shell
from factories import make_dead_letter, make_job, make_running_job, register_daemon, state_of
from rota.config.database_url import DatabaseUrl
from rota.daemon import database as daemon_database
from rota.db.migrate import VERSION
from rota.db.sql import MIGRATIONS
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database, Databases

CANARY = "S3CRET-canary"

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.chain")
async def chain(job):
    left = job.payload["left"]
    if left:
        async with job.transaction() as conn:
            await rota.enqueue(conn, "shop.chain", {"left": left - 1})
"""


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database, with an app in its folder."""
    (tmp_path / "shop.py").write_text(APP)
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


@pytest.fixture
async def empty_database_url(databases: Databases, conn: Connection[Record]) -> AsyncIterator[str]:
    """The URL of a database without the schema."""
    name = f"rota_blank_{os.getpid()}"
    await conn.execute(f"create database {name}")
    yield databases.server.dsn_for(name)
    await conn.execute(f"drop database {name} with (force)")


SLOW_TO_IMPORT = "aiohttp", "asyncpg", "croniter", "prometheus_client", "pydantic", "rich", "structlog", "uvloop"


async def test_help_imports_no_slow_library() -> None:
    """It must appear at once."""
    code = f"import rota.cli, sys; print([name for name in {SLOW_TO_IMPORT} if name in sys.modules])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


async def test_version_includes_the_time_zone_data(rota: Shell) -> None:
    result = await rota("--version")
    assert result.code == 0
    assert result.out.startswith("rota ")
    assert "tzdata" in result.out


async def test_migrate_creates_the_schema_and_check_reports_whether_it_is_needed(
    rota: Shell, empty_database_url: str
) -> None:
    """Running it twice is harmless."""
    missing = await rota("migrate", "--check", "--dsn", empty_database_url)
    first = await rota("migrate", "--dsn", empty_database_url, "--json")
    again = await rota("migrate", "--dsn", empty_database_url, "--json")
    checked = await rota("migrate", "--check", "--dsn", empty_database_url)

    assert (missing.code, first.code, again.code, checked.code) == (1, 0, 0, 0)
    assert "missing 0001_schema" in missing.out
    assert first.json["applied"][0] == "0001_schema"
    assert again.json == {"applied": [], "version": first.json["version"]}


async def test_the_printed_sql_creates_the_same_schema(rota: Shell, empty_database_url: str) -> None:
    printed = await rota("migrate", "--sql")
    connection = await asyncpg.connect(empty_database_url)
    try:
        await connection.execute(printed.out)
    finally:
        await connection.close()
    assert (await rota("migrate", "--check", "--dsn", empty_database_url)).code == 0


async def test_the_printed_sql_can_start_at_a_version(rota: Shell, empty_database_url: str) -> None:
    """By number or from the database. Applied to another version, it changes nothing."""
    version = len(MIGRATIONS) - 2
    connection = await asyncpg.connect(empty_database_url)
    try:
        everything = (await rota("migrate", "--sql")).out
        head = everything[: everything.index(f"-- {list(MIGRATIONS)[version]}\n")]
        await connection.execute(
            f"{head} insert into rota.meta (schema_version, oldest_compatible) values ({version}, 1); commit;"
        )
        printed = await rota("migrate", "--sql", "--from", "database", "--dsn", empty_database_url)
        assert "rota migrate --roles --sql" in printed.err
        assert printed.out == (await rota("migrate", "--sql", "--from", str(version), DATABASE_URL="")).out
        assert "create schema" not in printed.out
        wrong = (await rota("migrate", "--sql", "--from", str(version - 1), DATABASE_URL="")).out
        with pytest.raises(
            asyncpg.RaiseError, match=f"for version {version - 1} of the schema, and it is at {version}"
        ):
            await connection.execute(wrong)
        await connection.execute("rollback")
        await connection.execute(printed.out)
        assert (await rota("migrate", "--check", "--dsn", empty_database_url)).code == 0
    finally:
        await connection.close()
    assert (
        "nothing is missing" in (await rota("migrate", "--sql", "--from", "database", "--dsn", empty_database_url)).out
    )

    for options in (
        ("--sql", "--from", "999"),
        ("--from", "3"),
        ("--sql", "--roles", "--from", "3"),
        ("--sql", "--from", "x"),
    ):
        assert (await rota("migrate", *options)).code == 2


async def test_run_until_idle_ends_when_all_claimable_jobs_are_done(rota: Shell, conn: Connection[Record]) -> None:
    """This includes jobs that a job enqueues and suspects, not future jobs or jobs without a handler here."""
    await conn.execute("insert into rota.jobs (handler, payload, losses) values ('shop.chain', '{\"left\": 0}', 2)")
    await rota("enqueue", "shop.chain", '{"left": 5}')
    tomorrow = (await rota("enqueue", "shop.chain", '{"left": 0}', "--in", "1d", "--json")).json["job_id"]
    foreign = (await rota("enqueue", "elsewhere", "--json")).json["job_id"]

    result = await rota("run", "--app", "shop:app", "--until-idle")

    assert result.code == 0, result.err
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'succeeded'") == 7
    assert await state_of(conn, tomorrow) == "future"
    assert await state_of(conn, foreign) == "due"


async def test_run_until_idle_runs_all_suspects_one_after_the_other(rota: Shell, conn: Connection[Record]) -> None:
    await conn.execute(
        "insert into rota.jobs (handler, payload, losses) "
        "select 'shop.chain', '{\"left\": 0}', 2 from generate_series(1, 3)"
    )
    assert (await rota("run", "--app", "shop:app", "--until-idle")).code == 0
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'succeeded'") == 3


async def test_run_until_idle_ends_at_once_without_jobs(rota: Shell) -> None:
    assert (await rota("run", "--app", "shop", "--until-idle")).code == 0


async def test_without_a_database_the_error_names_each_setting_and_rota_dev(rota: Shell) -> None:
    for command in (["run", "--app", "shop:app"], ["status"], ["migrate"]):
        result = await rota(*command, DATABASE_URL="")
        assert result.code == 2
        for setting in ("DATABASE_URL", "ROTA_DATABASE_URL", "--dsn", "rota dev"):
            assert setting in result.err


async def test_an_unreachable_database_is_named_without_its_password(rota: Shell, database: Database) -> None:
    away = f"postgresql://me:{CANARY}@127.0.0.1:1/db"
    unknown = database.dsn.replace(database.name, "no_such_database")
    for dsn, word in ((away, "127.0.0.1:1"), (unknown, "no_such_database")):
        for command in (["run", "--app", "shop:app"], ["status"], ["migrate"]):
            result = await rota(*command, "--dsn", dsn)
            assert result.code == 3, result.err
            assert word in result.err
            assert CANARY not in result.out + result.err
    refused = await rota("status", "--dsn", f"postgres//me:{CANARY}@h/db")
    assert refused.code == 2
    assert CANARY not in refused.err


async def test_a_missing_and_a_newer_schema_have_different_advice(
    rota: Shell, empty_database_url: str, conn: Connection[Record]
) -> None:
    for command in (["run", "--app", "shop:app"], ["enqueue", "h"]):
        result = await rota(*command, "--dsn", empty_database_url)
        assert result.code == 3
        assert "rota migrate" in result.err

    await conn.execute("update rota.meta set schema_version = 999, oldest_compatible = 999")
    try:
        result = await rota("status")
    finally:
        await conn.execute("update rota.meta set schema_version = $1, oldest_compatible = $1", VERSION)
    assert result.code == 3
    assert "upgrade rota" in result.err


async def test_an_app_that_cannot_be_imported_is_explained(rota: Shell) -> None:
    """The message says where rota searched, what it found, a similar name, or the line that failed."""
    (rota.folder / "broken.py").write_text("import rota\n\nimport no_such_package\n")
    module = await rota("run", "--app", "shpo:app")
    attribute = await rota("run", "--app", "shop:ap")
    broken = await rota("run", "--app", "broken:app")
    nothing = await rota("run")

    assert {result.code for result in (module, attribute, broken, nothing)} == {2}
    assert "did you mean shop? Give" in module.err
    assert str(rota.folder.resolve()) in module.err
    assert "did you mean shop:app?" in attribute.err
    assert "no_such_package" in broken.err
    assert "broken.py, line 3" in broken.err
    assert "--app" in nothing.err


async def test_a_port_in_use_is_no_database_error(rota: Shell) -> None:
    with socket.socket() as other_socket:
        other_socket.bind(("127.0.0.1", 0))
        other_socket.listen()
        result = await rota("run", "--app", "shop:app", ROTA_HTTP_PORT=str(other_socket.getsockname()[1]))
    assert result.code == 4
    assert "ROTA_HTTP_PORT" in result.err


async def test_a_database_with_encoding_sql_ascii_is_rejected(
    rota: Shell, database: Database, conn: Connection[Record]
) -> None:
    """Clients could store bytes there that are no valid text."""
    await conn.execute("create database rota_test_ascii encoding 'SQL_ASCII' locale 'C' template template0")
    try:
        url = urlunsplit(urlsplit(database.dsn)._replace(path="/rota_test_ascii"))
        for command in (("migrate",), ("run", "--app", "shop:app")):
            result = await rota(*command, DATABASE_URL=url)
            assert result.code == 3
            assert "SQL_ASCII" in result.err
            assert "UTF8" in result.err
    finally:
        await conn.execute("drop database rota_test_ascii")


async def test_names_are_printed_where_the_output_encoding_lacks_their_letters(
    rota: Shell, conn: Connection[Record]
) -> None:
    """Cron jobs and containers often have no locale."""
    await conn.execute("select rota.put_schedule(name => 'café 🦊', every => '1 day', handler => 'h')")
    shown = await rota("schedule", "list", PYTHONIOENCODING="ascii")
    assert shown.code == 0
    assert r"caf\xe9 \U0001f98a" in shown.out


async def test_a_read_only_server_is_reported_with_advice_on_the_url(
    rota: Shell, database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover, the old URL may lead to a standby. A starting daemon waits for a while before it gives up."""
    monkeypatch.setattr(daemon_database, "FAILOVER_SECONDS", 0.5)
    await conn.execute(f"alter database {database.name} set default_transaction_read_only = on")

    written = await rota("enqueue", "h")
    with pytest.raises(DatabaseUnusable, match="target_session_attrs") as start:
        await daemon_database.find_database(DatabaseUrl(database.dsn), connection_name="test", on_wait=print)
    status = await rota("status")
    checked = await rota("check", "--json")
    await conn.execute(f"set default_transaction_read_only = off; alter database {database.name} reset all")

    assert (written.code, start.value.exit_code, status.code, checked.code) == (3, 3, 0, 1)
    assert "target_session_attrs" in written.err
    assert [finding["check"] for finding in checked.json["findings"]] == ["read-only"]


async def test_a_missing_privilege_is_reported_with_the_roles_that_have_it(
    rota: Shell, database: Database, databases: Databases, conn: Connection[Record]
) -> None:
    await conn.execute(
        "create role rota_test_poor login password 'poor'; grant usage on schema rota to rota_test_poor;"
        "grant select on rota.meta to rota_test_poor"
    )
    try:
        dsn = databases.server.dsn_for(database.name).replace("//postgres@", "//rota_test_poor:poor@")
        if "rota_test_poor" not in dsn:
            pytest.skip("the tests' server is not the embedded one")
        result = await rota("job", "cancel", "1", "--dsn", dsn)
    finally:
        await conn.execute("drop owned by rota_test_poor; drop role rota_test_poor")

    assert result.code == 3
    assert "permission denied" in result.err
    assert "rota_operator" in result.err


async def test_status_shows_due_and_dead_jobs_nodes_pauses_and_unserved_queues(
    rota: Shell, conn: Connection[Record]
) -> None:
    await register_daemon(conn, handlers=["h"], queues=["default"])
    await make_job(conn, run_at=timedelta(seconds=-90))
    await make_job(conn, queue="mail")
    await make_running_job(conn, lease=timedelta(seconds=-5))
    await make_dead_letter(conn)
    await conn.execute("select rota.pause_queue('mail', 'provider is down')")

    shown = (await rota("status", "--json")).json
    text = (await rota("status")).out

    default, mail = shown["queues"]
    assert (default["due"], default["running"], default["dead"], default["expired_leases"]) == (1, 1, 1, 1)
    assert default["oldest_due"] >= 0
    assert (mail["due"], mail["nodes"]) == (1, 0)
    assert [node["app"] for node in shown["nodes"]] == ["shop"]
    assert [paused["name"] for paused in shown["paused"]] == ["mail"]

    for words in ("1 expired lease", "provider is down", "paused"):
        assert words in text
    assert (await rota("status", "--watch", "--json")).code == 2
    assert "needs a terminal" in (await rota("status", "--watch")).err


async def test_check_exits_with_0_on_a_healthy_installation(rota: Shell) -> None:
    result = await rota("check", "--json")
    assert (result.code, result.json["findings"]) == (0, [])


async def test_check_prints_a_remedy_for_each_finding(rota: Shell, conn: Connection[Record]) -> None:
    await register_daemon(conn, handlers=["shop.chain"], queues=["default"])
    await make_job(conn, handler="shop.chian")
    await make_job(conn, handler="shop.chain", queue="mail")
    await make_running_job(conn, lease=timedelta(seconds=-60))
    await make_dead_letter(conn, reason="poison", error_kind="LeaseExpired")
    await conn.execute("alter table rota.jobs set (autovacuum_enabled = off)")
    try:
        result = await rota("check", "--json", ROTA_NONSENSE="1")
        text = await rota("check")
    finally:
        await conn.execute("alter table rota.jobs reset (autovacuum_enabled)")

    found = result.json["findings"]

    assert result.code == text.code == 1
    assert [each["check"] for each in found] == [
        "configuration",
        "autovacuum",
        "unclaimed",
        "unclaimed",
        "leases",
        "dead letters",
    ]
    assert all(each["do"] for each in found)
    assert any("did you mean 'shop.chain'" in each["do"] for each in found)
    assert "--reason poison --error-kind LeaseExpired" in text.out, (
        "filters that choose these, and no others beside them"
    )


async def test_config_shows_values_with_their_sources_and_no_password(rota: Shell) -> None:
    (rota.folder / "rota.toml").write_text('[lease]\nduration = "40s"\n')
    dsn = f"postgresql://me:{CANARY}@h/db"
    text = await rota("config", "--dsn", dsn, ROTA_DRAIN_TIMEOUT="7s")
    shown = await rota("config", "--dsn", dsn, "--json", ROTA_DRAIN_TIMEOUT="7s")

    assert CANARY not in text.out + text.err + shown.out + shown.err
    assert shown.json["values"]["lease"]["duration"] == "40s"
    assert shown.json["sources"]["lease.duration"] == "rota.toml"
    assert shown.json["sources"]["drain.timeout"] == "ROTA_DRAIN_TIMEOUT"
    assert shown.json["sources"]["queues"] == "default"
    assert 'duration = "40s"' in text.out

    bad = await rota("config", ROTA_LEASE="1s", ROTA_DRAIN_TIMEOUT="never")
    assert bad.code == 2
    assert "lease.duration" in bad.err
    assert "drain.timeout" in bad.err
