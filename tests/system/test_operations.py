"""Operators' commands: what they print, what they change, and what the audit records."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from command_line import Shell
from factories import make_dead_letters, make_handler, make_jobs, make_running_job, make_running_jobs

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.double")
async def double(job):
    return job.payload["n"] * 2

@app.handler("shop.fails", permanent=(KeyError,))
def fails(job):
    raise KeyError("nothing")

@app.handler("shop.writes")
async def writes(job):
    async with job.transaction() as conn:
        await conn.execute("insert into effects values ($1)", job.payload["n"])
"""


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database, with an app in its folder."""
    (tmp_path / "shop.py").write_text(APP)
    return Shell(tmp_path, {"DATABASE_URL": database.dsn, "ROTA_APP": "shop:app"})


async def register_daemon(conn: Connection[Record], *, handlers: list[str], queues: list[str]) -> None:
    """Insert the row of a daemon that counts as alive during the test."""
    await conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, release, handlers, queues, slots, tzdata, seen_at) "
        "values (gen_random_uuid(), 'here', 4711, '0.1', 'shop', 'r7', $1, $2, '{\"mail\": 5}', '2026a', now() + interval '1 h')",
        handlers,
        queues,
    )


async def test_pausing_and_resuming_a_queue_is_recorded_with_user_and_reason(
    rota: Shell, conn: Connection[Record]
) -> None:
    await register_daemon(conn, handlers=["h"], queues=["mail", "default"])
    await make_jobs(conn, 3, queue="mail")

    assert (await rota("queue", "pause", "mail", "--note", "provider is down", "--json")).json == {
        "paused": ["mail"],
        "changed": 1,
    }

    again = await rota("queue", "pause", "mail")
    assert (again.code, again.out) == (0, "queue mail was already paused; running jobs continue\n")

    shown = (await rota("queue", "list", "--json")).json
    text = (await rota("queue", "list")).out
    assert [line["due"] for line in shown["queues"] if line["queue"] == "mail"] == [3]
    assert [each["reason"] for each in shown["paused"]] == ["provider is down"]
    assert "provider is down" in text
    assert "is resumed" in (await rota("queue", "resume", "mail", "--note", "up again")).out
    assert "was not paused" in (await rota("queue", "resume", "mail")).out

    written = await conn.fetch("select action, target, reason, done_by from rota.audit order by audit_id")
    assert [tuple(row)[:3] for row in written] == [
        ("pause", "queue mail", "provider is down"),
        ("resume", "queue mail", "up again"),
    ]
    assert all(row["done_by"] for row in written)


async def test_resuming_everything_keeps_the_queues_that_were_paused_by_name(
    rota: Shell, conn: Connection[Record]
) -> None:
    assert (await rota("queue", "pause")).code == 2
    assert (await rota("queue", "pause", "mail", "--all")).code == 2

    await rota("queue", "pause", "mail", "--note", "mine")
    assert "every queue is paused" in (await rota("queue", "pause", "--all", "--note", "fire")).out
    assert "all queues are still paused" in (await rota("queue", "resume", "bulk")).err

    resumed = await rota("queue", "resume", "--all")
    assert "every queue is resumed" in resumed.out
    assert "still paused by name: mail" in resumed.err
    assert await conn.fetchval("select string_agg(queue, ',') from rota.queues where paused") == "mail"


async def test_handlers_are_paused_with_a_warning_for_an_unknown_name(rota: Shell, conn: Connection[Record]) -> None:
    """An unknown name is allowed, because it may come with the next release."""
    await make_handler(conn, "shop.double", app="shop", release="r7", queue="mail")
    await register_daemon(conn, handlers=["shop.double"], queues=["mail"])
    misspelt = await rota("handler", "pause", "shop.duoble", "--note", "bad numbers")
    assert misspelt.code == 0
    assert "the handler shop.duoble is paused, but no daemon has ever registered it" in misspelt.err

    paused = await rota("handler", "pause", "shop.double", "shop.duoble", "--note", "bad numbers", "--json")
    assert paused.json["changed"] == 1

    shown = {each["handler"]: each for each in (await rota("handler", "list", "--json")).json}
    assert (shown["shop.double"]["paused"], shown["shop.double"]["nodes"], shown["shop.double"]["queue"]) == (
        True,
        1,
        "mail",
    )
    assert shown["shop.double"]["pause_reason"] == "bad numbers"
    assert "bad numbers" in (await rota("handler", "list")).out
    assert (await rota("handler", "resume", "shop.double", "shop.duoble", "--json")).json["changed"] == 2
    assert await conn.fetchval("select count(*) from rota.audit") == 4


async def test_a_handler_whose_jobs_run_at_most_once_is_listed_with_one_attempt(
    rota: Shell, conn: Connection[Record]
) -> None:
    await make_handler(conn, "shop.charge", delivery="at_most_once")
    await make_handler(conn, "shop.mail")
    listed = (await rota("handler", "list")).out
    assert re.search(r"shop\.charge +default +1 ", listed)
    assert re.search(r"shop\.mail +default +20 ", listed)


async def test_one_invalid_name_makes_a_pause_of_several_queues_change_nothing(
    rota: Shell, conn: Connection[Record]
) -> None:
    result = await rota("queue", "pause", "mail", "a\nb")
    assert result.code == 1
    assert "must be a name" in result.err
    assert await conn.fetchval("select count(*) from rota.queues") == 0


async def test_nodes_are_listed_with_host_process_and_release(rota: Shell, conn: Connection[Record]) -> None:
    assert "no daemon is alive" in (await rota("node", "list")).out

    await register_daemon(conn, handlers=["h"], queues=["mail"])
    (shown,) = (await rota("node", "list", "--json")).json
    assert (shown["host"], shown["pid"], shown["release"], shown["tzdata"]) == ("here", 4711, "r7", "2026a")
    assert "here:4711" in (await rota("node", "list")).out

    # A killed node stays listed for a while, and must be shown as lost.
    for command in (("node", "list"), ("status",)):
        await conn.execute("update rota.nodes set seen_at = now() - interval '9 seconds'")
        out = (await rota(*command)).out
        assert re.search(r"silent \d+s", out)
        assert "running" not in out.split("here:4711")[1]


async def test_jobs_are_cancelled_by_filter_in_batches(rota: Shell, conn: Connection[Record]) -> None:
    """A dry run counts them first, and running jobs are asked to cancel."""
    await make_jobs(conn, 2500, handler="bad")
    await make_jobs(conn, 2, handler="good")
    await make_running_job(conn, handler="bad")
    assert (await rota("job", "cancel")).code == 2
    assert (await rota("job", "cancel", "--handler", "bad", "--force")).code == 2

    dry_run = await rota("job", "cancel", "--handler", "bad", "--dry-run", "--json")
    assert dry_run.json == {"dry_run": True, "cancelled": 2500, "requested": 1}
    assert await conn.fetchval("select count(*) from rota.jobs") == 2503

    resumed = await rota("job", "cancel", "--handler", "bad", "--note", "a loop", "--json")
    assert resumed.json == {"cancelled": 2500, "requested": 1}
    assert await conn.fetchval("select count(*) from rota.jobs where handler = 'good'") == 2
    assert (
        await conn.fetchval("select sum(affected) from rota.audit where action = 'cancel many' and reason = 'a loop'")
        == 2501
    )


async def test_the_summary_of_dead_letters_names_a_sample_of_each_kind(rota: Shell, conn: Connection[Record]) -> None:
    first = await make_dead_letters(conn, 3, handler="a", error_kind="ValueError")
    other = await make_dead_letters(conn, 1, handler="a", error_kind="KeyError", delivery="at_most_once")
    groups = (await rota("dead", "summary", "--json")).json
    assert [(g["handler"], g["reason"], g["error_kind"], g["letters"], g["sample"]) for g in groups] == [
        ("a", "exhausted", "ValueError", 3, first[-1]),
        ("a", "exhausted", "KeyError", 1, other[-1]),
    ]
    assert all(g["oldest"] <= g["newest"] for g in groups)
    assert str(first[-1]) in (await rota("dead", "summary")).out

    dry_run = await rota("dead", "redrive", "--handler", "a", "--dry-run")
    assert "dry run: 3 dead letters would be redriven; 1 at-most-once jobs would be skipped" in dry_run.out


async def test_lists_of_handlers_and_dead_letters_are_limited_to_a_hundred_lines(
    rota: Shell, conn: Connection[Record]
) -> None:
    await conn.execute(
        "insert into rota.handlers (handler, seen_at) select 'h' || n, now() from generate_series(1, 300) n"
    )
    await conn.execute("select rota.pause_handler('zz-paused', 'x')")
    await make_dead_letters(conn, 3, handler="zz-often")
    await conn.execute(
        "insert into rota.dead_letters select (jsonb_populate_record(letter, jsonb_build_object("
        "'job_id', 1000000 + n, 'handler', 'g' || n))).* "
        "from (select letter from rota.dead_letters letter limit 1) as one, generate_series(1, 300) n"
    )

    handlers, groups = (await rota("handler", "list", "--json")).json, (await rota("dead", "summary", "--json")).json
    assert (len(handlers), handlers[-1]["handler"], handlers[0]["total"]) == (100, "zz-paused", 301)
    assert (len(groups), groups[0]["handler"], groups[0]["total"]) == (100, "zz-often", 301)
    assert "… and 201 more handlers" in (await rota("handler", "list")).out
    assert "… and 201 more groups" in (await rota("dead", "summary")).out

    (found,) = [each for each in (await rota("check", "--json")).json["findings"] if "more" in each["object"]]
    assert (found["check"], found["object"]) == ("dead letters", "281 more of them")


async def test_a_handler_can_be_called_without_a_job(rota: Shell, conn: Connection[Record]) -> None:
    """The command prints its result, or its failure and the consequence, and stores nothing."""
    assert (await rota("call", "shop.double", '{"n": 21}')).out == "42\n"
    assert (await rota("call", "shop.double", '{"n": 21}', "--json", DATABASE_URL="")).json == {
        "outcome": "succeeded",
        "result": 42,
    }

    failed = await rota("call", "shop.fails", "--json")
    assert failed.code == 1
    assert "would become a dead letter (KeyError)" in failed.json["outcome"]
    assert "raise KeyError" in failed.json["error"]

    misspelt = await rota("call", "shop.duoble")
    assert misspelt.code == 2
    assert "did you mean 'shop.double'?" in misspelt.err
    assert (await rota("call", "shop.double", "{")).code == 2
    assert (await rota("call", "shop.double", ROTA_APP="")).code == 2

    await conn.execute("create table effects (n int)")
    assert (await rota("call", "shop.writes", json.dumps({"n": 7}))).code == 0
    assert await conn.fetchval("select n from effects") == 7
    assert await conn.fetchval("select count(*) from rota.job_status") == 0


async def test_a_configured_handler_can_be_called_without_a_job(rota: Shell) -> None:
    """This works on the embedded server too."""
    (rota.folder / "rota.toml").write_text(
        '[handlers.command.backup]\nargv = ["/bin/cat"]\n[handlers.http.endpoints.shop]\nurl = "http://127.0.0.1:1/"\n',
        encoding="ascii",
    )
    assert (await rota("call", "command.backup", '{"n": 21}', DATABASE_URL="")).code == 0

    refused = await rota("call", "http.shop", "--json", DATABASE_URL="")
    assert refused.code == 1
    assert "an endpoint with private = true may go there" in refused.json["error"]

    folder = str(rota.folder / "data")
    called = await rota(
        *("call", "shop.writes", '{"n": 7}', "--embedded", "--json"), ROTA_DATA_DIR=folder, DATABASE_URL=""
    )
    assert called.code == 1
    assert 'relation "effects" does not exist' in called.json["error"]

    (rota.folder / "rota.toml").write_text('[handlers.http.endpoints.shop]\nurl = "ftp://x"\n', encoding="ascii")
    assert "handlers.http.endpoints.shop.url (from rota.toml): write https://" in (await rota("status")).err


async def test_roles_are_created_or_printed_as_sql(rota: Shell, conn: Connection[Record]) -> None:
    """The printed SQL does the same as the command, and an invalid prefix is rejected first."""
    prefix = f"rt{os.getpid()}_cli"
    try:
        result = await rota("migrate", "--roles", "--role-prefix", prefix, "--json")
        assert result.json["roles"] == [f"{prefix}_{role}" for role in ("owner", "daemon", "operator", "client")]
        may = "select has_column_privilege($1, 'rota.jobs', 'payload', 'INSERT')"
        assert await conn.fetchval(may, f"{prefix}_client")
        await conn.execute(f"revoke all on rota.jobs from {prefix}_client")
        printed = await rota("migrate", "--roles", "--role-prefix", prefix, "--sql", DATABASE_URL="")
        await conn.execute(printed.out)
        assert await conn.fetchval(may, f"{prefix}_client")
        assert f"rights granted to {prefix}_owner" in (await rota("migrate", "--roles", "--role-prefix", prefix)).out
    finally:
        names = await conn.fetch("select rolname from pg_roles where starts_with(rolname, $1)", f"{prefix}_")
        await conn.execute(f"reassign owned by {prefix}_owner to current_user")
        for row in names:
            await conn.execute(f"drop owned by {row[0]}; drop role {row[0]}")
    for wrong in (
        ["--role-prefix", "shop"],
        ["--roles", "--role-prefix", "Shop"],
        ["--roles", "--role-prefix", "pg_x"],
        ["--roles", "--role-prefix", "a'; drop table x; --"],
        ["--roles", "--check"],
    ):
        assert (await rota("migrate", *wrong)).code == 2


async def test_invented_queues_are_summarised_in_one_line(rota: Shell, conn: Connection[Record]) -> None:
    """Clients may insert into any number of queues; queues that daemons serve are listed first."""
    await register_daemon(conn, handlers=["h"], queues=["mail", "default"])
    await conn.execute(
        "insert into rota.jobs (handler, queue) select 'h', 'a' || n from generate_series(1, 3000) as n"
        " union all select 'h', 'mail'"
    )
    shown = (await rota("queue", "list", "--json")).json
    assert {"mail", "default"} <= {line["queue"] for line in shown["queues"]}

    listed = len(shown["queues"])
    assert listed <= 100
    assert shown["more_queues"] == 3002 - listed
    assert sum(line["due"] for line in shown["queues"]) + shown["more"]["due"] == 3001

    for command in (["status"], ["queue", "list"]):
        text = (await rota(*command)).out
        assert f"and {3002 - listed:,} more queues: {shown['more']['due']:,} due" in text
        assert len(text.splitlines()) < 150
    findings = (await rota("check", "--json")).json["findings"]
    assert {"unclaimed", "lanes"} == {each["check"] for each in findings}
    assert len(findings) <= 22


async def test_a_due_job_shows_why_it_waits(rota: Shell, conn: Connection[Record]) -> None:
    """The slots are taken, or other jobs are ahead, and these daemons serve its queue."""
    await register_daemon(conn, handlers=["h", "other"], queues=["mail"])
    node = await conn.fetchval("select node_id from rota.nodes")
    await make_running_jobs(conn, 5, queue="mail", node=node)
    await make_jobs(conn, 2, queue="mail", handler="other", priority=0)
    await make_jobs(conn, 1, queue="mail", run_at=timedelta(hours=-1))
    await make_jobs(conn, 50, queue="mail", handler="unknown", priority=0)
    await make_jobs(conn, 4, queue="mail", priority=9)
    (job,) = await make_jobs(conn, 1, queue="mail")
    shown = (await rota("job", "show", str(job.job_id))).out
    assert re.search(r"waits +all 5 slots are taken; 3 jobs are ahead", shown)
    assert re.search(rf"served by +{str(node)[:8]} on here:4711 \(5 of 5 taken\)", shown)
    assert "all 5 slots are taken; 3 jobs are ahead" in (await rota("why", str(job.job_id))).out

    place = (await rota("job", "show", str(job.job_id), "--json")).json["place"]
    assert (place["ahead"], place["more"], len(place["nodes"])) == (3, False, 1)

    await make_jobs(conn, 1001, queue="mail", handler="other", priority=1)
    await conn.execute("delete from rota.jobs where state = 'running'")
    text = (await rota("why", str(job.job_id))).out
    assert "5 of 5 slots are free; more than 1,000 jobs are ahead" in text
