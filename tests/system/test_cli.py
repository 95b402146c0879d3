"""The commands as users run them: their output, their effects, and their errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from command_line import Shell, running_command
from factories import (
    make_attempts,
    make_dead_letter,
    make_dead_letters,
    make_job,
    make_running_job,
    state_of,
)
from rota.db.migrate import VERSION
from rota.db.sql import MIGRATIONS
from rota.embedded import EmbeddedPostgres, find_bindir
from rota.errors import NoPostgres
from servers import memory
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from asyncpg import Connection, Record

    from servers import Database, Databases

CANARY = "S3CRET-canary"

APP = """
import asyncpg
import rota

app = rota.App("shop")

@app.handler("shop.chain")
async def chain(job):
    left = job.payload["left"]
    if left:
        async with job.transaction() as conn:
            await rota.enqueue(conn, "shop.chain", {"left": left - 1})

@app.handler("shop.tells")
async def tells(job):
    raise rota.Permanent("can't use " + repr(job.payload))

@app.handler("shop.breaks", max_attempts=1)
async def breaks(job):
    deliver(job.payload["to"])

@app.handler("shop.breaks_apart", max_attempts=1, runs_in="process")
def breaks_apart(job):
    deliver(job.payload["to"])

def deliver(to):
    raise LookupError("no route to " + to)
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


async def test_help_imports_no_server_or_event_loop() -> None:
    """It must appear at once."""
    code = "import rota.cli, sys; print([m for m in ('aiohttp', 'uvloop', 'prometheus_client', 'rich') if m in sys.modules])"
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


async def test_f4_the_printed_sql_can_start_at_a_version(rota: Shell, empty_database_url: str) -> None:
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
    rota: Shell, database: Database, conn: Connection[Record]
) -> None:
    """After a failover, the old URL may lead to a standby."""
    await conn.execute(f"alter database {database.name} set default_transaction_read_only = on")
    wrote = await rota("enqueue", "h")
    run = await rota("run", "--app", "shop:app")
    read = await rota("status")
    checked = await rota("check", "--json")
    await conn.execute(f"set default_transaction_read_only = off; alter database {database.name} reset all")

    assert (wrote.code, run.code, read.code, checked.code) == (3, 3, 0, 1)
    assert "target_session_attrs" in wrote.err
    assert "target_session_attrs" in run.err
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


async def test_a_payload_that_cannot_be_stored_is_rejected_with_the_path_of_the_value(
    rota: Shell, conn: Connection[Record]
) -> None:
    for payload, path in (
        ('{"a": [1, NaN]}', "$.a[1]"),
        ('{"a": {"b": "x\\u0000"}}', "$.a.b"),
        ('{"a": "\\ud800"}', "$.a"),
        ('{"a": 1e999}', "$.a"),
    ):
        result = await rota("enqueue", "h", payload)
        assert result.code == 1
        assert path in result.err
    result = await rota("enqueue", "h", f'{{"password": "{CANARY}"')
    assert result.code == 2
    assert CANARY not in result.err

    result = await rota("enqueue", "h", "1" * 5000)
    assert (result.code, "Traceback" in result.err) == (1, False)
    assert "more digits" in result.err

    result = await rota("schedule", "add", "s", "h", "--every", "1h", "--meta", "{")
    assert result.code == 2
    assert "--meta" in result.err
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_numbers_are_stored_as_they_were_written(rota: Shell, conn: Connection[Record]) -> None:
    """jsonb keeps digits that a float would lose."""
    await rota("enqueue", "h", '{"n": 0.12345678901234567890123}')
    assert await conn.fetchval("select payload->>'n' from rota.jobs") == "0.12345678901234567890123"


async def test_enqueueing_for_an_unknown_handler_warns_and_keeps_the_job(rota: Shell, conn: Connection[Record]) -> None:
    unknown = await rota("enqueue", "shop.chain")
    assert unknown.code == 0
    assert "no daemon is alive" in unknown.err

    await _live(conn, handlers=["shop.chain"], queues=["default"])
    slip = await rota("enqueue", "shop.chian", "--json")
    lane = await rota("enqueue", "shop.chain", "--queue", "mail", "--json")
    fine = await rota("enqueue", "shop.chain", "--json")

    assert "'shop.chain'" in slip.json["warning"]
    assert "it waits, no attempt is used" in slip.json["warning"]
    assert "'mail'" in lane.json["warning"]
    assert fine.json["warning"] is None
    assert await conn.fetchval("select sum(attempt) from rota.jobs") == 0


async def test_an_instant_without_a_zone_is_rejected(rota: Shell) -> None:
    assert (await rota("enqueue", "h", "--at", "2027-01-01T09:00")).code == 2
    assert (await rota("enqueue", "h", "--at", "2027-01-01T09:00Z", "--in", "1h")).code == 2
    result = await rota("enqueue", "h", "--at", "2027-01-01T09:00+02:00", "--json")
    shown = await rota("job", "show", result.json["job_id"], "--json")
    assert shown.json["run_at"] == "2027-01-01T07:00:00+00:00"


async def test_a_unique_key_in_use_creates_no_second_job(rota: Shell) -> None:
    first = await rota("enqueue", "h", "--key", "k", "--json")
    second = await rota("enqueue", "h", "--key", "k", "--json")
    assert first.json["created"]
    assert second.json == {**first.json, "created": False, "outcome": "kept"}


async def test_b103_payloads_and_error_texts_are_shown_only_on_request(rota: Shell, conn: Connection[Record]) -> None:
    job_id = (await rota("enqueue", "shop.tells", json.dumps({"password": CANARY}), "--json")).json["job_id"]
    run = await rota("run", "--app", "shop:app", "--until-idle", ROTA_LOG_LEVEL="debug")
    assert CANARY not in run.out + run.err

    await conn.execute("update rota.dead_letters set error = $1, meta = $2", CANARY, json.dumps({"t": CANARY}))
    await make_attempts(conn, 1, job_id=job_id)
    await conn.execute("update rota.attempts set error = $1", CANARY)

    shown = [["job", "list"], ["job", "show", job_id], ["dead", "summary"], ["dead", "list"], ["dead", "show", job_id]]
    for command in (*shown, *([*each, "--json"] for each in shown), ["status"]):
        result = await rota(*command)
        assert (result.code, CANARY in result.out + result.err) == (0, False), command
    for command in (["check"], ["dead", "redrive", "--all", "--dry-run"]):
        result = await rota(*command)
        assert CANARY not in result.out + result.err, command

    assert CANARY in (await rota("dead", "show", job_id, "--payload")).out
    assert "--errors" in (await rota("job", "show", job_id)).err
    assert CANARY in (await rota("job", "show", job_id, "--errors")).out
    assert (await rota("job", "show", job_id, "--payload", "--json")).json["payload"] == {"password": CANARY}


async def test_a_number_too_large_for_python_is_shown(rota: Shell, conn: Connection[Record]) -> None:
    """It is valid jsonb."""
    job = await make_job(conn)
    await conn.execute("update rota.jobs set payload = '{\"n\": 1e5000}'")
    assert (await rota("job", "show", job.job_id, "--payload", "--json")).code == 0


async def test_job_show_says_when_the_job_gives_up(rota: Shell, conn: Connection[Record]) -> None:
    job = await make_job(conn, handler="shop.chain", attempt=2, run_at=timedelta(seconds=60), max_attempts=4)
    await make_attempts(conn, 2, job_id=job.job_id)
    shown = (await rota("job", "show", job.job_id, "--json")).json
    text = (await rota("job", "show", job.job_id)).out

    assert shown["state"] == "retrying"
    assert (shown["attempt"], shown["max_attempts"]) == (2, 4)
    # The third attempt is due in 60 s. The delay after it is at most 5 s * 2^2, and the fourth attempt is the last.
    assert shown["run_at"] < shown["gives_up"]["earliest"] < shown["gives_up"]["latest"]
    assert len(shown["attempts"]) == 2
    assert "error" not in shown["attempts"][0]
    assert "2 of 4" in text
    assert "gives up" in text
    assert "no daemon is alive" in text


async def test_an_unknown_job_has_an_exit_code_of_its_own(rota: Shell) -> None:
    for command in (["show"], ["cancel"], ["retry-now"], ["reschedule", "--in", "5m"]):
        result = await rota("job", *command, "4711")
        assert result.code == 1
        assert "4711" in result.err


async def test_jobs_are_listed_newest_first_and_filtered(rota: Shell, conn: Connection[Record]) -> None:
    due = await make_job(conn, handler="a")
    waits = await make_job(conn, handler="b", attempt=1, run_at=timedelta(seconds=60))
    dead = await make_dead_letter(conn, handler="a")

    async def ids(*filters: str) -> list[int]:
        return [job["job_id"] for job in (await rota("job", "list", "--json", *filters)).json]

    assert await ids() == sorted([due.job_id, waits.job_id, dead], reverse=True)
    assert await ids("--state", "retrying") == [waits.job_id]
    assert sorted(await ids("--handler", "a")) == sorted([due.job_id, dead])
    assert await ids("--queue", "unknown") == []
    assert len(await ids("--limit", "1")) == 1
    assert (await rota("job", "list", "--state", "sleeping")).code == 2


async def test_cancel_ends_a_waiting_job_and_asks_a_running_one(rota: Shell, conn: Connection[Record]) -> None:
    waits = await make_job(conn)
    runs = await make_running_job(conn)

    assert (await rota("job", "cancel", waits.job_id, "--note", "moot", "--json")).json["became"] == "cancelled"
    assert (await rota("job", "cancel", runs.job_id, "--json")).json["became"] == "requested"
    assert (await rota("job", "cancel", waits.job_id)).code == 1

    misread = await rota("job", "cancel", waits.job_id, "--before", "2026-01-01T00:00Z")
    assert (misread.code, "--before" in misread.err) == (2, True)
    assert (await rota("job", "cancel", runs.job_id, "--force", "--json")).json["became"] == "cancelled"
    assert await conn.fetchval("select note from rota.job_runs where job_id = $1", waits.job_id) == (
        await conn.fetchval("select 'cancelled by ' || session_user || ': moot'")
    )


async def test_waiting_jobs_can_be_made_due_now(rota: Shell, conn: Connection[Record]) -> None:
    """Acting on all of them needs --all."""
    one = await make_job(conn, handler="a", attempt=1, run_at=timedelta(seconds=600))
    other = await make_job(conn, handler="b", attempt=1, run_at=timedelta(seconds=600))
    assert (await rota("job", "retry-now")).code == 2
    assert (await rota("job", "retry-now", one.job_id, "--all")).code == 2
    assert (await rota("job", "retry-now", one.job_id)).code == 0
    assert (await state_of(conn, one.job_id), await state_of(conn, other.job_id)) == ("due", "retrying")
    assert (await rota("job", "retry-now", "--handler", "b", "--json")).json == {"woken": 1}

    later = (await rota("job", "reschedule", other.job_id, "--in", "1h", "--json")).json["run_at"]
    assert await conn.fetchval(
        "select run_at > now() + interval '59 min' from rota.jobs where job_id = $1", other.job_id
    )
    assert later


async def test_a_dry_run_counts_and_changes_nothing(rota: Shell, conn: Connection[Record]) -> None:
    await make_dead_letters(conn, 3, handler="a")
    letter = await make_dead_letter(conn, handler="b")
    for command in (["redrive"], ["discard", "--note", "n"]):
        result = await rota("dead", *command, "--handler", "a", "--dry-run", "--json")
        assert result.json["letters"] == 3
        result = await rota("dead", *command, "--all", "--dry-run")
        assert re.search(r"^ *3 +a ", result.out, re.MULTILINE), "the same table as in the summary"
        assert f"4 dead letters would be {command[0]}" in result.out.replace("redriven", "redrive").replace(
            "discarded", "discard"
        )
        assert "nothing was changed" in result.out
        result = await rota("dead", *command, "--all", "--limit", "2", "--dry-run")
        assert "2 dead letters would be" in result.out
        assert "the oldest of 4" in result.out
        result = await rota("dead", *command, letter, 4711, "--dry-run")
        assert f"job {letter} of b in queue default (exhausted: ValueError) would be" in result.out
        assert "job 4711 is unknown, not a dead letter" in result.out
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 4
    assert await conn.fetchval("select count(*) from rota.audit") == 0


async def test_a_dry_run_prints_names_without_control_characters(rota: Shell, conn: Connection[Record]) -> None:
    """Clients choose the names of handlers."""
    letter = await make_dead_letter(conn, handler="a\u202eb")
    assert "of a\\u202eb in queue" in (await rota("dead", "redrive", letter, "--dry-run")).out


async def test_dead_letters_are_redriven_in_batches(rota: Shell, conn: Connection[Record]) -> None:
    """At-most-once jobs stay dead letters."""
    await make_dead_letters(conn, 2500, handler="a")
    once = await make_dead_letter(conn, handler="a", delivery="at_most_once")

    assert (await rota("dead", "redrive")).code == 2

    result = await rota("dead", "redrive", "--handler", "a", "--spread", "1h", "--note", "mended", "--json")

    assert result.json == {"redriven": 2500, "left_out": 0}
    assert "1,000 redriven" in result.err
    assert "2,000 redriven" in result.err
    assert await conn.fetchval("select count(*) from rota.jobs") == 2500
    assert await conn.fetchval("select max(run_at) > now() + interval '50 min' from rota.jobs")
    assert await state_of(conn, once) == "dead"
    assert (await rota("dead", "redrive", once, "--payload", '{"n": 2}')).code == 0
    assert await conn.fetchval("select payload->>'n' from rota.jobs where job_id = $1", once) == "2"


async def test_an_invalid_job_id_is_reported_as_such(rota: Shell) -> None:
    commands = ("job show", "job cancel", "job retry-now", "job reschedule", "dead show", "dead redrive")
    numbers = ("9223372036854775808", "1e3", "9" * 5000)
    for command, number in [*((command, "0") for command in commands), *(("job show", number) for number in numbers)]:
        result = await rota(*command.split(), number)
        assert (result.code, "is not a job id" in result.err) == (2, True), (command, number)


async def test_a_redrive_stops_at_its_limit(rota: Shell, conn: Connection[Record]) -> None:
    await make_dead_letters(conn, 5)
    assert (await rota("dead", "redrive", "--all", "--limit", "2", "--json")).json["redriven"] == 2
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 3


async def test_discarding_needs_a_reason_and_takes_all_named_dead_letters_or_none(
    rota: Shell, conn: Connection[Record]
) -> None:
    ids = await make_dead_letters(conn, 2)

    assert (await rota("dead", "discard", *ids)).code == 2
    assert (await rota("dead", "discard", *ids, "--note", " ")).code == 2
    assert (await rota("dead", "discard", *ids, 4711, "--note", "old")).code == 1
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 2
    assert (await rota("dead", "discard", *ids, "--note", "old", "--json")).json == {"discarded": 2}
    assert (
        await conn.fetchval("select count(*) from rota.job_runs where outcome = 'discarded' and note like '%old'") == 2
    )


async def test_status_shows_due_and_dead_jobs_nodes_pauses_and_unserved_queues(
    rota: Shell, conn: Connection[Record]
) -> None:
    await _live(conn, handlers=["h"], queues=["default"])
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
    await _live(conn, handlers=["shop.chain"], queues=["default"])
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


@pytest.fixture
def embedded_shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose embedded PostgreSQL uses a folder that the server's user can reach."""
    try:
        find_bindir()
    except NoPostgres as error:
        pytest.skip(str(error))
    (tmp_path / "shop.py").write_text(APP)
    with tempfile.TemporaryDirectory(prefix="rota-dev-", dir=memory()) as folder:
        Path(folder).chmod(0o755)
        yield Shell(tmp_path, {"ROTA_DATA_DIR": f"{folder}/pg", "ROTA_LOG_FORMAT": "json", "ROTA_HTTP_PORT": ""})


async def test_dev_starts_all_that_a_first_job_needs(embedded_shell: Shell) -> None:
    """It starts a server, the schema, a daemon and sample handlers, and prints the next command to type."""
    with running_command(embedded_shell, "dev", "--app", "shop:app") as (process, output):
        await eventually(lambda: "node.started" in output(), within=60, what="the daemon")
        assert "psql" in output()
        assert "insert into rota.jobs" in output()

        for command in (
            ["rota.echo", '{"hello": "world"}'],
            ["shop.chain", '{"left": 1}'],
            ["rota.fail", '{"permanent": true}'],
        ):
            assert (await embedded_shell("enqueue", *command, "--embedded")).err == ""

        async def has_ended() -> bool:
            queues = (await embedded_shell("status", "--embedded", "--json")).json["queues"]
            return bool(queues) and not queues[0]["due"] and not queues[0]["running"] and queues[0]["dead"] == 1

        await eventually(has_ended, within=30, what="the end of all jobs")
        assert (await embedded_shell("job", "show", "1", "--embedded", "--payload", "--json")).json["result"] == {
            "hello": "world"
        }

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


async def test_an_embedded_database_of_another_version_is_reported_with_the_folder_to_remove(
    embedded_shell: Shell,
) -> None:
    folder = embedded_shell.environ["ROTA_DATA_DIR"]
    with running_command(embedded_shell, "dev") as (process, output):
        await eventually(lambda: "node.started" in output(), within=60, what="the daemon")
        with EmbeddedPostgres(data=Path(folder)) as server:
            conn = await asyncpg.connect(server.dsn)
            await conn.execute("update rota.migrations set checksum = 'another' where version = 2")
            await conn.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    again = await embedded_shell("dev")

    assert again.code == 3
    assert "whose content differs" in again.err
    assert f"remove {folder}" in again.err


@pytest.mark.parametrize("format", ["json", "console"])
async def test_f6_dev_shows_the_traceback_of_a_failed_handler(embedded_shell: Shell, format: str) -> None:  # noqa: A002
    """Values of the payload are masked."""
    embedded_shell.environ["ROTA_LOG_FORMAT"] = format
    with running_command(embedded_shell, "dev", "--app", "shop:app") as (process, output):
        await eventually(lambda: "node.started" in output(), within=60, what="the daemon")
        for handler in ("shop.breaks", "shop.breaks_apart"):
            assert (await embedded_shell("enqueue", handler, f'{{"to": "{CANARY}"}}', "--embedded")).err == ""
        await eventually(lambda: output().count("LookupError: no route to ***") == 2, within=30, what="both messages")
        assert output().count("in deliver") == 2
        assert "in breaks\\n" in output() if format == "json" else "in breaks\n" in output()
        assert CANARY not in output()

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_e6_a_second_dev_takes_the_server_over_when_the_first_ends(
    embedded_shell: Shell, number: signal.Signals
) -> None:
    """Its daemon continues, and no job is lost."""
    with running_command(embedded_shell, "dev") as (first, first_output):
        await eventually(lambda: "node.started" in first_output(), within=60, what="the first daemon")
        with running_command(embedded_shell, "dev", "--app", "shop:app") as (second, output):
            await eventually(lambda: "node.started" in output(), within=60, what="the second daemon")
            first.send_signal(number)
            first.wait(30)
            await eventually(lambda: "this process runs it now" in output(), within=30, what="the takeover")
            enqueued = await embedded_shell("enqueue", "shop.chain", '{"left": 0}', "--embedded")
            assert enqueued.code == 0, enqueued.err

            async def has_ended() -> bool:
                shown = await embedded_shell("job", "show", enqueued.out.strip(), "--embedded", "--json")
                return bool(shown.json["state"] == "succeeded")

            await eventually(has_ended, within=30, what="a job of the second daemon")
            second.send_signal(signal.SIGTERM)
            assert second.wait(30) == 0

    assert not (Path(embedded_shell.environ["ROTA_DATA_DIR"]) / "postmaster.pid").exists()


async def test_dev_restarts_when_the_source_changes(embedded_shell: Shell) -> None:
    """The database stays up, and after a syntax error it waits for the next change."""
    source = embedded_shell.folder / "shop.py"
    with running_command(embedded_shell, "dev", "--app", "shop:app", "--reload") as (process, output):
        until(lambda: output().count("node.started") == 1, within=60, what="the first daemon")
        source.write_text(APP + "\nthis is no Python\n")
        until(lambda: "can't be imported" in output(), within=30, what="the complaint")
        source.write_text(APP + "\n@app.handler('shop.new')\nasync def new(job): ...\n")
        until(lambda: output().count("node.started") == 2, within=30, what="the second daemon")
        assert "shop.new" in output()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    assert output().count("node.stopped") == 2


async def _live(conn: Connection[Record], *, handlers: list[str], queues: list[str]) -> None:
    await conn.execute(
        """
        insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, seen_at)
        values (gen_random_uuid(), 'here', 1, '0', 'shop', $1, $2, '{"default": 5}', now() + interval '1 hour')
        """,
        handlers,
        queues,
    )
