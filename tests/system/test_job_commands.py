"""Commands about jobs and dead letters: enqueue, list, show, cancel, retry, redrive, discard."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from command_line import Shell
from factories import (
    make_attempts,
    make_dead_letter,
    make_dead_letters,
    make_job,
    make_running_job,
    register_daemon,
    state_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database

CANARY = "S3CRET-canary"

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.tells")
async def tells(job):
    raise rota.Permanent("can't use " + repr(job.payload))
"""


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database, with an app in its folder."""
    (tmp_path / "shop.py").write_text(APP)
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


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

    await register_daemon(conn, handlers=["shop.chain"], queues=["default"])
    misspelt = await rota("enqueue", "shop.chian", "--json")
    unserved = await rota("enqueue", "shop.chain", "--queue", "mail", "--json")
    served = await rota("enqueue", "shop.chain", "--json")

    assert "'shop.chain'" in misspelt.json["warning"]
    assert "it waits, no attempt is used" in misspelt.json["warning"]
    assert "'mail'" in unserved.json["warning"]
    assert served.json["warning"] is None
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


async def test_payloads_and_error_texts_are_shown_only_on_request(rota: Shell, conn: Connection[Record]) -> None:
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
    waiting = await make_job(conn, handler="b", attempt=1, run_at=timedelta(seconds=60))
    dead = await make_dead_letter(conn, handler="a")

    async def list_ids(*filters: str) -> list[int]:
        return [job["job_id"] for job in (await rota("job", "list", "--json", *filters)).json]

    assert await list_ids() == sorted([due.job_id, waiting.job_id, dead], reverse=True)
    assert await list_ids("--state", "retrying") == [waiting.job_id]
    assert sorted(await list_ids("--handler", "a")) == sorted([due.job_id, dead])
    assert await list_ids("--queue", "unknown") == []
    assert len(await list_ids("--limit", "1")) == 1
    assert (await rota("job", "list", "--state", "sleeping")).code == 2


async def test_cancel_ends_a_waiting_job_and_asks_a_running_one(rota: Shell, conn: Connection[Record]) -> None:
    waiting = await make_job(conn)
    running = await make_running_job(conn)

    assert (await rota("job", "cancel", waiting.job_id, "--note", "moot", "--json")).json["became"] == "cancelled"
    assert (await rota("job", "cancel", running.job_id, "--json")).json["became"] == "requested"
    assert (await rota("job", "cancel", waiting.job_id)).code == 1

    misread = await rota("job", "cancel", waiting.job_id, "--before", "2026-01-01T00:00Z")
    assert (misread.code, "--before" in misread.err) == (2, True)
    assert (await rota("job", "cancel", running.job_id, "--force", "--json")).json["became"] == "cancelled"
    assert await conn.fetchval("select note from rota.job_runs where job_id = $1", waiting.job_id) == (
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
