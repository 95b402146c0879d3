"""Commands that list and change many jobs and schedules by filter."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from command_line import Shell
from factories import make_dead_letter, make_job, make_jobs, make_running_job
from schedule_rows import make_schedule

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database."""
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


async def test_jobs_are_listed_by_schedule_and_time(rota: Shell, conn: Connection[Record]) -> None:
    nightly = await make_schedule(conn, "nightly")
    await conn.execute(
        "insert into rota.job_runs (job_id, schedule_id, scheduled_for, handler, queue, outcome, attempts, finished_at) values "
        "(1001, $1, now(), 'h', 'default', 'succeeded', 1, now() - interval '3 hours'), "
        "(1002, $1, now(), 'h', 'default', 'succeeded', 1, now() - interval '10 minutes'), "
        "(1003, 77, now(), 'h', 'default', 'succeeded', 1, now() - interval '10 minutes')",
        nightly,
    )
    later = (await make_job(conn, run_at=timedelta(hours=1))).job_id
    running = (await make_running_job(conn)).job_id

    async def list_names(*options: str) -> set[int]:
        result = await rota("job", "list", *options, "--json")
        assert result.code == 0, result.err
        return {each["job_id"] for each in result.json}

    assert await list_names("--schedule", "nightly") == {1001, 1002}
    assert await list_names("--since", "1h") == {1002, 1003, later, running}
    assert await list_names("--since", "4h", "--until", "2h") == {1001}

    table = (await rota("job", "list")).out
    assert "schedule" in table.splitlines()[0]
    assert "nightly" in table
    assert "removed (77)" in table

    unknown = await rota("job", "list", "--schedule", "nihgtly")
    assert (unknown.code, "did you mean 'nightly'" in unknown.err) == (1, True)
    assert (await rota("job", "list", "--since", "yesterday")).code == 2


async def test_schedules_are_listed_by_name_pattern_and_owner(rota: Shell, conn: Connection[Record]) -> None:
    """A pattern may contain * and ?; every other character stands for itself."""
    for name, owner in (("report daily", "ann"), ("report_weekly", "bob"), ("reportXweekly", None), ("50%", "ann")):
        await make_schedule(conn, name, owner=owner)

    async def list_names(*options: str) -> list[str]:
        return sorted(each["name"] for each in (await rota("schedule", "list", *options, "--json")).json)

    assert await list_names("--name", "report*") == ["report daily", "reportXweekly", "report_weekly"]
    assert await list_names("--name", "report_weekly") == ["report_weekly"]
    assert await list_names("--name", "report?weekly") == ["reportXweekly", "report_weekly"]
    assert await list_names("--name", "50%") == ["50%"]
    assert await list_names("--owner", "ann") == ["50%", "report daily"]
    assert await list_names("--owner", "ann", "--name", "r*") == ["report daily"]


async def test_pausing_a_queue_or_handler_warns_that_schedules_keep_firing(rota: Shell) -> None:
    """Their jobs pile up, and all run when the queue is resumed."""
    everything = await rota("queue", "pause", "--all")
    assert (
        "schedules still enqueue jobs, which will wait. To stop schedules too: rota schedule pause --all"
        in everything.out
    )

    as_json = await rota("queue", "pause", "mail", "--json")
    assert as_json.json == {"paused": ["mail"], "changed": 1}
    assert "schedules still enqueue" in as_json.err
    assert "rota schedule pause --handler" in (await rota("handler", "pause", "h")).err


async def test_resuming_all_schedules_resumes_only_those_that_pause_all_paused(
    rota: Shell, conn: Connection[Record]
) -> None:
    """Schedules paused before stay paused, and the audit records who, why and how many."""
    for name, handler, owner in (("a", "h", "ann"), ("b", "h", None), ("c", "g", "ann"), ("before", "h", "ann")):
        await make_schedule(conn, name, handler=handler, owner=owner)
    await rota("schedule", "pause", "before")

    async def list_paused() -> set[str]:
        return {row["name"] for row in await conn.fetch("select name from rota.schedules where paused")}

    dry_run = await rota("schedule", "pause", "--all", "--dry-run")
    assert "dry run: 3 schedules would be paused, 1 are paused already; nothing was changed" in dry_run.out
    assert await list_paused() == {"before"}
    result = await rota("schedule", "pause", "--all", "--note", "incident 7")
    assert result.code == 0, result.err
    assert "3 schedules paused; 1 were paused before. Jobs already enqueued will run" in result.out
    assert await list_paused() == {"a", "b", "c", "before"}
    why = await rota("why", "a")
    assert "incident 7" in why.out
    undo = result.out.splitlines()[-1].partition("rota ")[2].split()
    resumed = await rota(*undo, "--note", "over")
    assert "3 schedules resumed" in resumed.out
    assert await list_paused() == {"before"}
    audit = await conn.fetch("select action, target, reason, affected from rota.audit order by audit_id")
    assert [tuple(row) for row in audit][1:] == [
        ("pause", "schedules: all", "incident 7", 3),
        ("resume", "schedules: all", "over", 3),
    ]

    assert "1 schedule paused" in (await rota("schedule", "pause", "--handler", "h", "--owner", "ann")).out
    assert "1 schedule paused" in (await rota("schedule", "pause", "--name", "c*")).out
    assert (await rota("schedule", "resume", "--all", "--json")).json == {"resumed": 3}
    assert await list_paused() == set()
    for wrong in (
        ("pause",),
        ("pause", "a", "--all"),
        ("pause", "a", "--dry-run"),
        ("pause", "--all", "--cancel-live"),
    ):
        assert (await rota("schedule", *wrong)).code == 2


async def test_a_locked_schedule_does_not_delay_pausing_the_others(
    rota: Shell, conn: Connection[Record], database: Database
) -> None:
    """The command reports that it was left out."""
    await make_schedule(conn, "free")
    await make_schedule(conn, "locked")
    async with database.connect() as other, other.transaction():
        await other.execute("update rota.schedules set description = 'x' where name = 'locked'")
        result = await rota("schedule", "pause", "--all")
        assert "1 schedule paused" in result.out
        assert "1 schedules are new or locked by other transactions" in result.err


async def test_cancel_all_cancels_every_live_job_after_a_dry_run(rota: Shell, conn: Connection[Record]) -> None:
    """This includes jobs that are due next year."""
    await make_jobs(conn, 3, run_at=timedelta(days=300))
    await make_jobs(conn, 2, handler="other", queue="q")
    await make_running_job(conn)
    dry_run = await rota("job", "cancel", "--all", "--dry-run")
    assert "5 jobs would be cancelled, 1 running asked to stop" in dry_run.out

    due = await rota("job", "cancel", "--before", "2100-01-01T00:00:00Z", "--dry-run")
    assert "5 jobs would be cancelled" in due.out

    result = await rota("job", "cancel", "--all", "--note", "wrong import", "--json")
    assert result.json == {"cancelled": 5, "requested": 1}
    assert await conn.fetchval("select count(*) from rota.jobs where state = 'scheduled'") == 0

    audit = await conn.fetchrow("select * from rota.audit order by audit_id desc limit 1")
    assert audit is not None
    assert (audit["action"], audit["reason"], audit["affected"]) == ("cancel many", "wrong import", 6)

    for wrong in ((), ("--all", "--queue", "q"), ("1", "--all"), ("1", "--dry-run")):
        assert (await rota("job", "cancel", *wrong)).code == 2


async def test_a_redriven_job_shows_who_redrove_it_and_from_which_job(rota: Shell, conn: Connection[Record]) -> None:
    """This holds after a bulk redrive and after the job has ended."""
    single = await make_dead_letter(conn, reason="exhausted", error_kind="BankTimeout")
    bulk = await make_dead_letter(conn, handler="charge", reason="permanent", error_kind="KeyError")
    for job_id in (single, bulk):
        await conn.execute(
            "insert into rota.attempts (job_id, fence_token, attempt, outcome, error_kind) "
            "select job_id, fence_token, 3, 'failed', error_kind from rota.dead_letters where job_id = $1",
            job_id,
        )
    assert (await rota("dead", "redrive", str(single))).code == 0
    assert (await rota("dead", "redrive", "--handler", "charge")).code == 0

    me = await conn.fetchval("select session_user::text")
    for job_id, why in ((single, "exhausted, BankTimeout"), (bulk, "permanent, KeyError")):
        line = next(
            line for line in (await rota("job", "show", job_id)).out.splitlines() if line.startswith("redriven")
        )
        assert f"by {me}" in line
        assert line.endswith(why)
        assert why in (await rota("why", job_id)).out
    await rota("job", "cancel", str(single))
    shown = (await rota("job", "show", str(single), "--json")).json
    assert (shown["state"], shown["attempts"][0]["redriven_by"]) == ("cancelled", me)
    assert shown["attempts"][0]["dead_reason"] == "exhausted"

    discarded = await make_dead_letter(conn)
    await rota("dead", "discard", str(discarded), "--note", "moot")
    assert not await conn.fetchval(
        "select count(*) from rota.attempts where job_id = $1 and redriven_at is not null", discarded
    )


async def test_the_error_for_a_value_out_of_range_names_its_row_and_column(
    rota: Shell, conn: Connection[Record]
) -> None:
    """PostgreSQL's own message, `timestamp out of range`, names neither."""
    await make_schedule(conn, "hostile")
    job_id = (await make_job(conn)).job_id
    await conn.execute("set session_replication_role = replica")
    for table, constraint in await conn.fetch(
        "select conrelid::regclass::text, conname from pg_constraint "
        "where contype = 'c' and conrelid in ('rota.jobs'::regclass, 'rota.schedule_definitions'::regclass)"
    ):
        await conn.execute(f'alter table {table} drop constraint "{constraint}"')
    await conn.execute("update rota.schedule_definitions set start_within = '106751000 days'")
    await conn.execute("update rota.jobs set retry_for = '106751000 days' where job_id = $1", job_id)
    for command in (
        ("run-now", "hostile"),
        ("backfill", "hostile", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-02T00:00:00Z"),
    ):
        result = await rota("schedule", *command)
        assert result.code == 1
        assert "out of range" in result.err
        assert "start_within of schedule hostile is 106751000 days" in result.err
        assert f"retry_for of job {job_id} is 106751000 days" in result.err
    for shown in (("job", "show", str(job_id)), ("why", str(job_id)), ("job", "list")):
        assert (await rota(*shown)).code == 0
    for given in (
        ("job", "list", "--until", "9999-12-31T23:59:59-14:00"),
        ("why", "hostile", "--at", "0001-01-01T00:00:00+14:00"),
    ):
        refused = await rota(*given)
        assert (refused.code, "choose a year from 1900 to 8999" in refused.err) == (2, True)


async def test_put_says_whether_the_existing_job_was_replaced(rota: Shell, conn: Connection[Record]) -> None:
    """A running job is not replaced, and the answer must differ."""

    async def put_job(*options: str) -> Any:
        result = await rota("enqueue", "h", '{"n": 1}', "--key", "k", *options, "--json")
        return result.json["created"], result.json["outcome"]

    assert await put_job() == (True, "created")
    assert await put_job() == (False, "kept")
    assert await put_job("--on-conflict", "replace") == (False, "replaced")

    await conn.execute("update rota.jobs set attempt = 1, fence_token = 1")  # it has run once and waits for its retry
    assert await put_job("--on-conflict", "replace") == (True, "replaced")

    await make_running_job(conn, handler="r", unique_key="k")
    result = await rota("enqueue", "r", "--key", "k", "--on-conflict", "replace")
    assert "this live job has the key and is running" in result.err
    assert (await rota("enqueue", "h", "--key", "k", "--on-conflict", "error")).code == 1
