"""The schedule commands, and two services with schedules in one database."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest

import rota as package
from command_line import CommandResult, Shell
from factories import register_daemon
from processes import Daemons
from schedule_rows import make_due, make_schedule
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection, Record

    from servers import Database

SOURCE = Path(package.__file__).resolve().parent.parent

SERVICE = """
from datetime import timedelta
import rota

app = rota.App("{name}", release="{release}")

@app.schedule({when}, name="{name}.tick"{more})
@app.handler("{name}.tick")
async def tick(job):
    return {{"scheduled_for": job.scheduled_for.isoformat()}}
"""

DAILY = ("--cron", "30 2 * * *", "--timezone", "Europe/Berlin")


def service_source(name: str, when: str = '"0 6 * * *"', *, release: str = "1", more: str = "") -> str:
    """The source of a service with one handler and one schedule."""
    return SERVICE.format(name=name, when=when, release=release, more=more)


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database, with a service in its folder."""
    (tmp_path / "shop.py").write_text(service_source("shop"))
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


@pytest.fixture
async def daemons(tmp_path: Path, database: Database) -> AsyncIterator[Daemons]:
    """Real daemons that take their app from the command line, not from ROTA_APP."""
    path = os.pathsep.join([str(SOURCE), str(tmp_path)])
    with Daemons(tmp_path, database.dsn, app="shop:app", environ={"PYTHONPATH": path}) as schedule_id:
        yield schedule_id


def check_findings(result: CommandResult) -> dict[str, str]:
    """Return check -> finding of `rota check`."""
    return {each["check"]: each["finding"] for each in result.json["findings"]}


async def test_next_marks_clock_gaps_and_folds(rota: Shell) -> None:
    """It needs no database."""
    result = await rota(
        *("cron", "next", "30 2 * * *", "--timezone", "Europe/Berlin", "--after", "2026-03-28T12:00:00Z", "--count", 2),
        "--json",
        DATABASE_URL="",
    )
    assert result.code == 0

    jump, following = result.json
    assert (jump["scheduled_for"], jump["fires"]) == ("2026-03-29T01:00:00+00:00", True)
    assert jump["local"] == "2026-03-29T03:00:00+02:00"
    assert "gap" in jump["note"]
    assert (following["scheduled_for"], following["note"]) == ("2026-03-30T00:30:00+00:00", None)

    answers = await rota(
        *("cron", "next", "30 2 * * *", "--timezone", "Europe/Berlin", "--after", "2026-10-24T12:00:00Z", "--count", 2),
        *("--fold", "both"),
    )
    assert answers.out.count("fold:") == 2


async def test_the_error_for_an_invalid_expression_or_option_says_why(rota: Shell) -> None:
    impossible = await rota("cron", "next", "0 0 30 2 *")
    zone = await rota("cron", "explain", "* * * * *", "--timezone", "Europe/Berlln")
    option = await rota("cron", "next", "* * * * *", "--gap", "before")
    naive = await rota("cron", "next", "* * * * *", "--after", "2026-01-01T00:00")
    assert (impossible.code, zone.code, option.code, naive.code) == (1, 1, 2, 2)
    assert "February 30" in impossible.err
    assert "did you mean `Europe/Berlin`?" in zone.err
    assert "--gap" in option.err


async def test_explain_describes_an_expression_in_words(rota: Shell) -> None:
    result = await rota("cron", "explain", "0 9 * * 1-5", "--timezone", "Europe/Vienna", "--json")
    assert result.json["explanation"] == "At 09:00 on Monday to Friday, Europe/Vienna time."


async def test_add_creates_a_schedule_and_prints_its_next_fire(rota: Shell, conn: Connection[Record]) -> None:
    """Every option sets a column, and an existing schedule is not overwritten."""
    result = await rota(
        *("schedule", "add", "nightly", "h", *DAILY, "--payload", '{"n": 0.12345678901234567890}', "--priority", 2),
        *("--jitter", "5m", "--overlap", "queue_one", "--misfire", "all", "--start-at", "2026-01-01T00:00:00Z"),
        *("--expect-success-within", "25h", "--gap", "skip", "--fold", "both", "--meta", '{"team": "a"}', "--json"),
    )
    assert result.code == 0, result.err
    assert datetime.fromisoformat(result.json["next_fire_at"]) > datetime.now(UTC)
    assert "no daemon is alive" in result.json["warnings"][0]

    row = await conn.fetchrow("select *, payload->>'n' as n from rota.schedules")
    assert row is not None
    assert (row["cron"], row["timezone"], row["n"]) == ("30 2 * * *", "Europe/Berlin", "0.12345678901234567890")
    assert (row["priority"], row["jitter"], row["overlap"], row["misfire"]) == (
        2,
        timedelta(minutes=5),
        "queue_one",
        "all",
    )
    assert (row["dst_gap"], row["dst_fold"], row["expect_success_within"]) == ("skip", "both", timedelta(hours=25))

    again = await rota("schedule", "add", "nightly", "other", "--every", "1h")
    assert again.code == 1
    assert "rota schedule set" in again.err
    assert await conn.fetchval("select handler from rota.schedules") == "h"


async def test_unusual_names_and_values_are_stored_unchanged_or_rejected_with_the_reason(
    rota: Shell, conn: Connection[Record]
) -> None:
    odd_name = '"; drop table rota.jobs; -- 🕰 \u202e'
    assert (await rota("schedule", "add", odd_name, "h", "--every", "1h")).code in {0, 1}

    valid_name = 'it\'s "quoted" 🕰'
    assert (await rota("schedule", "add", valid_name, "h", "--every", "1h")).code == 0
    assert (await rota("schedule", "show", valid_name, "--json")).json["name"] == valid_name

    for arguments, words in (
        (("", "h", "--every", "1h"), "name must be"),
        (("x" * 300, "h", "--every", "1h"), "name must be"),
        (("a\nb", "h", "--every", "1h"), "name must be"),
        (("s", "h", "--every", "1h", "--overlap", "maybe"), "overlap must be"),
        (("s", "h", "--every", "500ms"), "every must lie"),
        (("s", "h", "--cron", "61 * * * *"), "minute 61 is outside 0-59"),
    ):
        result = await rota("schedule", "add", *arguments)
        assert result.code == 1, arguments
        assert words in result.err
    usage = await rota("schedule", "add", "s", "h")
    assert usage.code == 2
    assert await conn.fetchval("select count(*) from rota.schedules where name = 's'") == 0


async def test_an_unknown_zone_is_rejected_and_if_stored_by_sql_stops_only_that_schedule(
    rota: Shell, daemons: Daemons, conn: Connection[Record]
) -> None:
    """The schedule never falls back to UTC."""
    result = await rota("schedule", "add", "s", "h", "--cron", "* * * * *", "--timezone", "Europe/Berlln")
    assert result.code == 1
    assert "Europe/Berlin" in result.err

    await make_schedule(conn, "misspelt", cron="* * * * * *", timezone="Europe/Berlln")
    await make_schedule(conn, "fine", cron="* * * * * *", handler="shop.tick")
    daemons.start()

    async def have_fired() -> bool:
        return bool(await conn.fetchval("select exists (select from rota.fires where name = 'fine')"))

    await eventually(have_fired)
    answer = await rota("why", "misspelt", "--json")
    assert answer.json["verdict"] == "invalid"
    assert "Europe/Berlln" in answer.json["answer"]

    found = await rota("check", "--json")
    assert found.code == 1
    assert "misspelt" in check_findings(found)["invalid schedules"]

    listed = await rota("schedule", "list", "--state", "invalid", "--json")
    assert [each["name"] for each in listed.json] == ["misspelt"]


async def test_without_zone_data_no_command_starts(rota: Shell) -> None:
    """Neither UTC nor outdated files of the system may be used instead."""
    (rota.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Away:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'tzdata':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Away())\n"
    )
    path = os.pathsep.join([str(rota.folder), str(SOURCE)])
    for command in (("run", "--app", "shop:app"), ("cron", "explain", "* * * * *", "--timezone", "Europe/Berlin")):
        result = await rota(*command, PYTHONPATH=path)
        assert result.code == 2
        assert "tzdata is missing" in result.err


async def test_set_changes_only_the_named_options_and_fires_nothing(rota: Shell, conn: Connection[Record]) -> None:
    """The next fire is strictly later than the edit."""
    schedule_id = await make_schedule(conn, cron="51 11 * * *", payload='{"n": 1}')
    await make_due(conn, schedule_id)
    result = await rota("schedule", "set", "s", "--every", "2h", "--max-attempts", 3, "--json")
    assert result.code == 0, result.err

    row = await conn.fetchrow("select * from rota.schedules")
    assert row is not None
    assert (row["cron"], row["every"], row["max_attempts"], row["payload"]) == (None, timedelta(hours=2), 3, '{"n": 1}')
    assert datetime.fromisoformat(result.json["next_fire_at"]) > row["edited_at"]
    assert await conn.fetchval("select array_agg(disposition) from rota.fires") == ["skipped_edit"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0

    await rota("schedule", "set", "s", "--default", "max_attempts", "--default", "payload", "--cron", "0 1 * * *")
    row = await conn.fetchrow("select * from rota.schedules")
    assert row is not None
    assert (row["cron"], row["every"], row["max_attempts"], row["payload"]) == ("0 1 * * *", None, None, "{}")
    assert (await rota("schedule", "set", "s")).code == 2
    assert (await rota("schedule", "set", "s", "--default", "nonsense")).code == 2

    unknown = await rota("schedule", "set", "ss", "--every", "1h")
    assert unknown.code == 1
    assert "did you mean 's'?" in unknown.err


async def test_a_paused_schedule_shows_who_paused_it_and_why_and_can_run_by_hand(
    rota: Shell, conn: Connection[Record]
) -> None:
    await make_schedule(conn)
    first = await rota("schedule", "pause", "s", "--for", "1h", "--note", "moving house", "--json")
    again = await rota("schedule", "pause", "s", "--for", "2h", "--json")
    assert (first.json["changed"], again.json["changed"]) == (1, 1)

    why = await rota("why", "s", "--json")
    assert why.json["verdict"] == "paused"
    assert "postgres" in why.json["answer"]

    ran = await rota("schedule", "run-now", "s", "--payload", "[7]", "--json")
    job = await conn.fetchrow("select payload, job_id from rota.jobs")
    assert job is not None
    assert (job["job_id"], job["payload"]) == (ran.json["job_id"], "[7]")
    assert (await rota("schedule", "resume", "s", "--json")).json == {"resumed": ["s"], "changed": 1}
    assert (await rota("schedule", "resume", "s", "nobody")).code == 1

    removed = await rota("schedule", "remove", "s", "--note", "done with")
    assert removed.code == 0
    assert await conn.fetchval("select count(*) from rota.schedules") == 0

    after = await rota("why", "s", "--json")
    assert after.json["verdict"] == "removed"
    assert after.json["fire"]["disposition"] == "run_now"


async def test_preview_shows_local_and_utc_time_and_the_jitter(rota: Shell) -> None:
    await rota("schedule", "add", "nightly", "h", *DAILY, "--jitter", "5m")
    result = await rota("schedule", "preview", "nightly", "--after", "2026-10-24T12:00:00Z", "--count", 2, "--json")
    first, second_pass, following = result.json
    assert (first["fires"], second_pass["fires"], following["fires"]) == (True, False, True)
    assert "left out" in second_pass["note"]
    assert second_pass["run_at"] is None

    later = {
        datetime.fromisoformat(each["run_at"]) - datetime.fromisoformat(each["scheduled_for"])
        for each in (first, following)
    }
    assert len(later) == 1
    assert timedelta(0) <= later.pop() < timedelta(minutes=5)
    assert "jitter" in (await rota("schedule", "preview", "nightly")).out


async def test_check_names_stopped_and_unsuccessful_schedules(rota: Shell, conn: Connection[Record]) -> None:
    """It also reports daemons with different zone data."""
    overdue = await make_schedule(conn, "late")
    await make_due(conn, overdue, ago=timedelta(minutes=5))
    await make_schedule(conn, "silent", expect_success_within=timedelta(hours=1))
    await conn.execute(
        "update rota.schedule_definitions set created_at = now() - interval '2 hours' where name = 'silent'"
    )
    await register_daemon(conn, tzdata="2025b")
    await register_daemon(conn, tzdata="2026a")
    result = await rota("check", "--json")
    assert result.code == 1
    assert check_findings(result).keys() == {"overdue schedules", "no success", "tzdata"}
    assert "late" in check_findings(result)["overdue schedules"]
    assert "silent" in check_findings(result)["no success"]
    assert "2025b" in check_findings(result)["tzdata"]

    silent = await rota("schedule", "list", "--state", "silent", "--json")
    assert [each["name"] for each in silent.json] == ["silent"]


async def test_check_uses_the_handlers_queue_for_a_schedule_without_one(rota: Shell, conn: Connection[Record]) -> None:
    await conn.execute(
        """
        insert into rota.nodes (node_id, host, pid, rota_version, handlers, queues, slots, seen_at)
        values (gen_random_uuid(), 'here', 1, '0', '{send,count}', '{mail}', '{"mail": 5}', now() + interval '1 hour');
        insert into rota.handlers (handler, queue, seen_at) values ('send', 'mail', now()), ('count', null, now());
        """
    )
    served = await rota("schedule", "add", "served", "send", "--every", "1h", "--json")
    assert served.json["warnings"] == []

    other = await rota("schedule", "add", "other", "count", "--every", "1h", "--json")
    assert "no living daemon serves the queue 'default'" in other.json["warnings"][0]


async def test_many_schedules_at_one_instant_without_jitter_are_reported(rota: Shell, conn: Connection[Record]) -> None:
    """Both `add` and `check` warn."""
    await register_daemon(conn)
    await conn.execute(
        "insert into rota.schedules (name, handler, cron, start_at) "
        "select 's' || n, 'h', '0 0 * * *', now() from generate_series(1, 1000) n"
    )
    midnight = (
        "update rota.schedule_clocks set next_fire_at = "
        "date_trunc('day', now() at time zone 'utc') at time zone 'utc' + interval '1 day'"
    )
    await conn.execute(midnight)
    assert "crowd" not in check_findings(await rota("check", "--json"))

    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
    assert "crowd" not in check_findings(await rota("check", "--json"))

    one_more = await rota("schedule", "add", "last", "h", "--cron", "0 0 * * *", "--json")
    assert "1,001 schedules" in one_more.json["warnings"][0]

    spread = await rota("schedule", "add", "spread", "h", "--cron", "0 0 * * *", "--jitter", "5m", "--json")
    assert spread.json["warnings"] == []
    assert "1,001 schedules" in check_findings(await rota("check", "--json"))["crowd"]

    await conn.execute(midnight)
    assert "1,001 schedules" in check_findings(await rota("check", "--json"))["crowd"]


async def test_status_lists_the_next_fires_soonest_first(rota: Shell, conn: Connection[Record]) -> None:
    for name, hours in (("later", 2), ("sooner", 1)):
        await make_due(conn, await make_schedule(conn, name), ago=-timedelta(hours=hours))
    result = await rota("status", "--json")
    assert [each["name"] for each in result.json["next_fires"]] == ["sooner", "later"]
    assert result.json["schedules"] == {"ok": 2}
    assert "sooner" in (await rota("status")).out


async def test_backfill_runs_each_past_instant_once(rota: Shell, conn: Connection[Record]) -> None:
    """A second backfill has nothing to do."""
    await rota("schedule", "add", "hourly", "h", "--cron", "0 * * * *")
    span = ("--from", "2026-03-01T00:00:00Z", "--to", "2026-03-01T06:00:00Z")
    dry_run = await rota("schedule", "backfill", "hourly", *span, "--dry-run", "--json")
    assert (dry_run.json["instants"], dry_run.json["enqueued"]) == (6, 0)
    result = await rota("schedule", "backfill", "hourly", *span, "--spread", "1h", "--json")
    assert (result.json["enqueued"], result.json["left_out"]) == (6, 0)
    jobs = await conn.fetch("select scheduled_for, run_at from rota.jobs order by scheduled_for")
    assert [job["scheduled_for"].hour for job in jobs] == list(range(6))
    steps = {later["run_at"] - earlier["run_at"] for earlier, later in pairwise(jobs)}
    assert steps == {timedelta(minutes=10)}
    again = await rota("schedule", "backfill", "hourly", *span, "--json")
    assert (again.json["enqueued"], again.json["left_out"]) == (0, 6)
    assert (await rota("schedule", "backfill", "hourly", "--from", span[3], "--to", span[1])).code == 2
    future = await rota(
        "schedule", "backfill", "hourly", "--from", "2190-01-01T00:00Z", "--to", "2190-01-02T00:00Z", "--json"
    )
    assert future.json["instants"] == 0


@pytest.mark.parametrize(
    ("day", "columns", "counts"),
    [
        ("2026-03-29", ("--cron", "0 * * * *"), 23),
        ("2025-10-26", ("--cron", "0 * * * *"), 25),
        ("2026-03-29", ("--cron", "30 2 * * *"), 1),
        ("2026-03-29", ("--cron", "30 2 * * *", "--gap", "skip"), 0),
        ("2025-10-26", ("--cron", "30 2 * * *"), 1),
        ("2025-10-26", ("--cron", "30 2 * * *", "--fold", "both"), 2),
        ("2026-03-29", ("--every", "1h", "--start-at", "2020-01-01T00:00Z"), 23),
    ],
)
async def test_backfill_of_a_day_with_a_clock_change_follows_the_schedules_settings(
    rota: Shell, conn: Connection[Record], day: str, columns: tuple[str, ...], counts: int
) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo("Europe/Berlin"))
    end = start + timedelta(days=1)  # in local time
    span = ("--from", start.isoformat(), "--to", end.isoformat(), "--json")
    await rota("schedule", "add", "s", "h", *columns, "--timezone", "Europe/Berlin")
    dry_run = await rota("schedule", "backfill", "s", *span, "--dry-run")
    assert (dry_run.json["instants"], dry_run.json["more"]) == (counts, False)
    assert (await rota("schedule", "backfill", "s", *span)).json["enqueued"] == counts
    assert await conn.fetchval("select count(distinct scheduled_for) from rota.jobs") == counts


async def test_a_backfill_with_too_many_instants_is_rejected_and_a_dry_run_reports_its_limit(
    rota: Shell, conn: Connection[Record]
) -> None:
    """Two centuries of seconds are neither counted nor kept in memory."""
    await rota("schedule", "add", "s", "h", "--every", "1s", "--start-at", "1971-01-01T00:00Z")
    span = ("--from", "1970-01-01T00:00Z", "--to", "2199-01-01T00:00Z")
    dry_run = await rota("schedule", "backfill", "s", *span, "--dry-run", "--json")
    assert (dry_run.code, dry_run.json["instants"], dry_run.json["more"]) == (0, 100_000, True)
    assert dry_run.json["last"] == ["1971-01-02T03:46:39+00:00"]
    assert "more than 100,000 instants" in (await rota("schedule", "backfill", "s", *span, "--dry-run")).out

    refused = await rota("schedule", "backfill", "s", *span)
    assert refused.code == 1
    assert "1971-01-02T03:46:39" in refused.err
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_sync_reports_and_applies_the_declarations(rota: Shell, conn: Connection[Record]) -> None:
    """A schedule that the code no longer declares is removed only with --prune."""
    sync = ("schedule", "sync", "--app", "shop:app", "--json")
    dry_run = await rota(*sync, "--dry-run")
    assert [each["became"] for each in dry_run.json["schedules"]] == ["inserted"]
    assert await conn.fetchval("select count(*) from rota.schedules") == 0
    assert (await rota(*sync)).json["schedules"][0]["became"] == "inserted"
    assert (await rota(*sync)).json["schedules"][0]["became"] == "unchanged"

    (rota.folder / "shop.py").write_text(
        service_source("shop", release="2", when='"0 7 * * *"').replace("shop.tick", "shop.tock")
    )
    assert {each["name"]: each["became"] for each in (await rota(*sync)).json["schedules"]} == {
        "shop.tick": "undeclared",
        "shop.tock": "inserted",
    }
    assert (await rota(*sync, "--prune")).json["schedules"][0]["became"] == "removed"
    assert await conn.fetchval("select array_agg(name) from rota.schedules") == ["shop.tock"]
    assert (await rota("schedule", "sync")).code == 2


async def test_two_services_share_a_database_and_any_node_fires_both(
    rota: Shell, daemons: Daemons, conn: Connection[Record]
) -> None:
    """The node without the handler leaves the job to the other one."""
    (rota.folder / "a.py").write_text(service_source("a", "every=timedelta(seconds=1)", more=', overlap="allow"'))
    (rota.folder / "b.py").write_text(service_source("b", "every=timedelta(seconds=1)", more=', overlap="allow"'))
    assert (await rota("schedule", "sync", "--app", "a:app")).code == 0

    daemons._app = "b:app"
    daemons.start()

    async def have_fired(name: str, outcome: str | None) -> bool:
        return bool(
            await conn.fetchval(
                """
                select count(*) >= 2 from rota.fires
                left join rota.job_runs using (job_id)
                where name = $1 and disposition = 'enqueued' and job_runs.outcome is not distinct from $2
                """,
                name,
                outcome,
            )
        )

    await eventually(lambda: have_fired("b.tick", "succeeded"), within=20)
    await eventually(lambda: have_fired("a.tick", None), within=20)
    assert await conn.fetchval("select count(*) from rota.job_runs where handler = 'a.tick'") == 0

    daemons._app = "a:app"
    daemons.start()
    await eventually(lambda: have_fired("a.tick", "succeeded"), within=20)
    rows = await conn.fetch(
        "select name, declared_by, last_success_at is not null as ran from rota.schedules order by 1"
    )
    assert [(row["name"], row["declared_by"]) for row in rows] == [("a.tick", "a"), ("b.tick", "b")]


async def test_an_operators_edit_survives_restarts_of_daemons_of_two_releases(
    rota: Shell, daemons: Daemons, conn: Connection[Record]
) -> None:
    """The older release changes nothing."""
    (rota.folder / "shop.py").write_text(service_source("shop", release="1.9"))
    daemons.start().stop()
    await rota("schedule", "set", "shop.tick", "--cron", "0 5 * * *")
    await rota("schedule", "pause", "shop.tick")
    daemons.start().stop()
    row = await conn.fetchrow("select cron, paused, version from rota.schedules")
    assert row is not None
    assert (row["cron"], row["paused"]) == ("0 5 * * *", True)

    (rota.folder / "shop.py").write_text(service_source("shop", '"0 7 * * *"', release="1.10"))
    daemon = daemons.start()
    daemon.wait_for("schedule.updated", schedule="shop.tick")
    daemon.stop()
    (rota.folder / "shop.py").write_text(service_source("shop", release="1.9"))
    daemon = daemons.start()
    daemon.wait_for("schedule.left_alone", what="newer_release")
    daemon.stop()
    row = await conn.fetchrow("select cron, paused, declared from rota.schedules")
    assert row is not None
    assert (row["cron"], row["paused"]) == ("0 7 * * *", True)
    assert json.loads(row["declared"])["release"] == "1.10"
    assert await conn.fetchval("select count(*) from rota.jobs") == 0
