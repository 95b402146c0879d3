"""`rota why` explains what became of an instant of a schedule, or of a job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from command_line import Shell
from schedule_rows import make_schedule

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database

DAILY = ("--cron", "30 2 * * *", "--timezone", "Europe/Berlin")


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database."""
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


async def test_why_explains_each_disposition_of_an_instant(rota: Shell, conn: Connection[Record]) -> None:
    """Enqueued, skipped, part of a missed stretch, or no instant of the schedule."""
    schedule_id = await make_schedule(conn, cron="0 6 * * *", timezone="Europe/Berlin")
    await conn.execute("update rota.schedule_definitions set created_at = '2026-01-01', edited_at = '2026-01-01'")
    job = await conn.fetchval("insert into rota.jobs (handler) values ('h') returning job_id")
    await conn.execute(
        f"""
        insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id, missed_from, missed_count, decided_at)
        values ('2026-07-01 04:00+00', {schedule_id}, 's', 'enqueued', {job}, null, null, '2026-07-01 04:00:00.01+00'),
            ('2026-07-02 04:00+00', {schedule_id}, 's', 'skipped_overlap', null, null, null, now()),
            ('2026-07-09 04:00+00', {schedule_id}, 's', 'skipped_misfire', null, '2026-07-04 04:00+00', 6, now())
        """
    )

    async def explain(at: str) -> Any:
        result = await rota("why", "s", "--at", at, "--json")
        assert result.code == 0, result.err
        return result.json

    enqueued = await explain("2026-07-01T06:00")
    assert (enqueued["verdict"], enqueued["job_id"], enqueued["job_state"]) == ("enqueued", job, "due")
    assert "on time" in enqueued["answer"]
    assert "still live" in (await explain("2026-07-02T04:00:00Z"))["answer"]

    inside = await explain("2026-07-06T06:00")
    assert inside["verdict"] == "skipped_misfire"
    assert "6 instants" in inside["answer"]

    between = await explain("2026-07-01T12:00:00+02:00")
    assert between["verdict"] == "not_due"
    assert between["before"]["scheduled_for"] == "2026-07-01T04:00:00+00:00"
    assert between["before"]["became"] == f"enqueued, job {job}"
    assert (between["after"]["became"]) == "skipped_overlap"
    assert (await explain("2100-07-01T06:00"))["verdict"] == "future"
    assert (await explain("2025-07-01T06:00"))["verdict"] == "before_creation"
    assert (await rota("why", "s", "--at", "yesterday")).code == 2

    unknown = await rota("why", "ss")
    assert unknown.code == 1
    assert "did you mean" in unknown.err


async def test_why_finds_an_instant_as_it_is_displayed(rota: Shell, conn: Connection[Record]) -> None:
    """Instants of `every` have fractions of a second, which only --json shows."""
    await make_schedule(conn, every=timedelta(seconds=5))
    await conn.execute("update rota.schedule_definitions set created_at = '2026-01-01 00:00:00.7+00'")
    result = await rota("schedule", "preview", "s", "--after", "2100-01-01T00:00:01Z", "--count", 1)
    day, time, *_ = result.out.splitlines()[2].split()
    found = await rota("why", "s", "--at", f"{day} {time}", "--json")
    assert (found.json["verdict"], found.json["at"]) == ("future", "2100-01-01T00:00:05.700000+00:00")


async def test_why_asks_which_instant_of_a_clock_fold_is_meant(rota: Shell) -> None:
    await rota("schedule", "add", "nightly", "h", *DAILY)
    result = await rota("why", "nightly", "--at", "2090-10-29T02:30", "--json")
    assert [each["verdict"] for each in result.json["answers"]] == ["future", "not_due"]


async def test_why_explains_the_second_pass_of_a_fold_and_times_between_instants(
    rota: Shell, conn: Connection[Record]
) -> None:
    schedule_id = await make_schedule(conn, cron="30 2 * * *", timezone="Europe/Berlin")
    await conn.execute("update rota.schedule_definitions set created_at = '2026-01-01', edited_at = '2026-01-01'")
    insert = "insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id, missed_from, missed_count) values "
    await conn.execute(insert + f"('2026-10-25 00:30Z', {schedule_id}, 's', 'enqueued', 5, null, null)")

    async def explain(at: str) -> Any:
        result = await rota("why", "s", "--at", at, "--json")
        assert result.code == 0, result.err
        return result.json

    answers = (await explain("2026-10-25T02:30"))["answers"]
    assert [each["verdict"] for each in answers] == ["enqueued", "not_due"]

    second = "the clock shows 02:30 twice, and with dst_fold = first the schedule fires only the first time"
    assert (
        f"{second}, at 2026-10-25 00:30:00Z (enqueued, job 5). To fire both times: rota schedule set s --fold both"
        in (answers[1]["answer"])
    )

    for each in (await explain("2026-10-25T02:15"))["answers"]:
        assert each["verdict"] == "not_due"
        assert "left out" not in each["answer"]
    jumped = await explain("2026-03-29T02:15")
    assert (jumped["verdict"], "skips 02:15" in jumped["answer"]) == ("not_due", True)
    assert (await explain("2026-03-29T02:30"))["verdict"] == "undecided"

    await conn.execute("delete from rota.fires")
    missed = "'skipped_misfire', null, '2026-10-25 00:30Z', 2)"
    await conn.execute(insert + f"('2026-10-26 01:30Z', {schedule_id}, 's', {missed}")
    answers = (await explain("2026-10-25T02:30"))["answers"]
    assert [each["verdict"] for each in answers] == ["skipped_misfire", "not_due"]
    assert "fires only the first time" in answers[1]["answer"]
    assert (await explain("2026-10-25T12:00:00Z"))["verdict"] == "not_due"


async def test_why_accepts_a_job_id_and_explains_its_fire(rota: Shell, conn: Connection[Record]) -> None:
    await make_schedule(conn)
    job_id = (await rota("schedule", "run-now", "s", "--note", "try it")).out.strip()
    result = await rota("why", job_id, "--json")
    assert result.json["schedule"] == "s"
    assert result.json["verdict"] == "due"
    assert "no daemon is alive" in result.json["answer"]
    assert "try it" in result.json["answer"]
    assert (await rota("why", "999")).code == 1
