"""`rota limit`, and how `rota why` and `rota job show` explain jobs that wait for a limit."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from command_line import Shell
from factories import make_job, make_jobs, make_running_job
from pages import blocks, page
from role_logins import role_database
from rota import App

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database, Server

KEY = "tenant:42"


@pytest.fixture
def rota(tmp_path: Path, database: Database) -> Shell:
    """A shell on the test's database."""
    return Shell(tmp_path, {"DATABASE_URL": database.dsn})


async def limit_line(rota: Shell, job_id: int) -> str:
    """The line about limits of `rota why`, which must be the same in `rota job show`."""
    why, shown = await rota("why", job_id), await rota("job", "show", job_id)
    assert (why.code, shown.code) == (0, 0), why.err + shown.err
    (line,) = [line for line in why.out.splitlines() if line.strip().startswith("limit:")] or [""]
    text = line.strip().removeprefix("limit: ")
    assert text.partition(" (in ")[0] in shown.out
    return text


async def test_a_limit_is_set_changed_listed_and_removed(rota: Shell, conn: Connection[Record]) -> None:
    """Values that are not named stay as they are."""
    result = await rota(
        "limit", "set", "tenant:*", "--max-running", 2, "--max-starts", 10, "--per", "90s", "--note", "fair"
    )
    assert (result.code, result.out) == (0, "limit tenant:*: 2 running, 10 starts per 1m 30s\n")
    assert (await rota("limit", "set", "tenant:*", "--weight", 3)).out == (
        "limit tenant:*: 2 running, 10 starts per 1m 30s, weight 3\n"
    )
    await rota("limit", "set", "tenant:*", "--default", "max_starts")
    await make_running_job(conn, limit_key=KEY)
    await make_jobs(conn, 3, limit_key="tenant:7")
    await make_job(conn, limit_key="other")
    await conn.execute("select rota.set_limit('handler:h', 9)")
    listed = (await rota("limit", "list", "--json")).json
    assert [(each["key"], each["running"], each["waiting"], each["more"]) for each in listed] == [
        ("handler:h", 1, 4, False),
        ("tenant:*", 1, 3, False),
    ]
    assert (listed[1]["max_starts"], listed[1]["weight"], listed[1]["note"]) == (None, 3, "fair")
    table = (await rota("limit", "list")).out
    assert "2 running, weight 3" in table
    assert "fair" in table

    lowered = await rota("limit", "set", KEY, "--max-running", 0)
    assert "1 running job of the key may finish; no other job starts" in lowered.err
    assert "limit tenant:* (2 running, weight 3) no longer applies to this key" in lowered.err
    removed = await rota("limit", "remove", KEY)
    assert removed.out == f"limit {KEY} is removed\n"
    assert "limit tenant:* applies to it now: 2 running, weight 3" in removed.err
    unknown = await rota("limit", "remove", "tenant*")
    assert (unknown.code, "there is no limit 'tenant*': did you mean 'tenant:*'?" in unknown.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "give at least one value"),
        (("--max-starts", "5"), "give --max-starts and --per together"),
        (("--max-starts", "5", "--per", "32d"), "choose 1s to 31d"),
        (("--default", "per"), "'per' is not one of max_running, max_starts, weight, note"),
    ],
)
async def test_a_limit_that_makes_no_sense_is_a_usage_error(
    rota: Shell, arguments: tuple[str, ...], error: str
) -> None:
    result = await rota("limit", "set", KEY, *arguments)
    assert (result.code, error in " ".join(result.err.split())) == (2, True), result.err


async def test_why_names_the_limit_its_jobs_and_the_jobs_ahead(rota: Shell, conn: Connection[Record]) -> None:
    """Ahead are jobs of the same key that start first, by priority and time, counted up to 1,000."""
    first, second = [(await make_running_job(conn, limit_key=KEY)).job_id for _ in range(2)]
    (job,) = await make_jobs(conn, 1, limit_key=KEY, run_at=timedelta(seconds=-5))
    await make_jobs(conn, 317, limit_key=KEY, run_at=timedelta(seconds=-9))
    await make_jobs(conn, 1, limit_key=KEY, priority=0, queue="other", run_at=timedelta(seconds=-1))
    await make_jobs(conn, 5, limit_key=KEY, run_at=timedelta(seconds=-1))
    await make_jobs(conn, 5, limit_key=KEY, priority=0, run_at=timedelta(hours=1))
    assert await limit_line(rota, job.job_id) == ""
    await rota("limit", "set", "tenant:*", "--max-running", 2)
    text = f"limit {KEY} (of tenant:*): 2 of 2 running (jobs {first} and {second}), 318 ahead"
    assert await limit_line(rota, job.job_id) == f"waits for {text}"
    await make_jobs(conn, 1000, limit_key=KEY, run_at=timedelta(minutes=-9))
    assert (await limit_line(rota, job.job_id)).endswith("more than 1,000 ahead")

    listed = (await rota("job", "list", "--state", "limited", "--limit-key", KEY, "--limit", 1, "--json")).json
    assert (listed[0]["state"], listed[0]["limit_key"]) == ("limited", KEY)
    await rota("limit", "set", "tenant:*", "--max-running", 3)
    assert (await limit_line(rota, job.job_id)).startswith(f"limit {KEY} (of tenant:*) has a permit: 2 of 3 running")
    shown = (await rota("job", "show", job.job_id, "--json")).json
    assert (shown["state"], shown["limit_key"], shown["limits"][0]["open"]) == ("limited", KEY, True)


async def test_why_explains_pauses_holds_starts_and_the_limits_of_handlers_and_queues(
    rota: Shell, conn: Connection[Record]
) -> None:
    """All closed limits are named, because the job needs a permit of each."""
    job = (await make_job(conn, limit_key=KEY)).job_id
    await make_job(conn, run_at=timedelta(seconds=-9))
    await rota("limit", "set", KEY, "--max-running", 0)
    assert await limit_line(rota, job) == f"waits for limit {KEY}: paused (max_running 0), 0 ahead"

    await rota("limit", "set", KEY, "--default", "max_running", "--max-starts", 1, "--per", "1h")
    await conn.execute("insert into rota.limit_starts values ($1, 1, now() - interval '10 minutes 10 seconds')", KEY)
    text = await limit_line(rota, job)
    assert text.startswith(f"waits for limit {KEY}: 1 of 1 starts within 1h, the next one possible at ")
    assert "(in 49m" in text

    await rota("limit", "remove", KEY)
    held = await rota("limit", "hold", KEY, "--for", "10m", "--note", "429")
    assert (held.code, held.out.startswith(f"limit {KEY} is held until ")) == (0, True), held.err
    assert "(in 9m" in held.out
    text = await limit_line(rota, job)
    assert await conn.fetchval("select state from rota.job_status where job_id = $1", job) == "limited"
    assert text.startswith(f"waits for limit {KEY}: held until ")
    assert text.endswith("(429), 0 ahead")
    assert (await rota("limit", "hold", KEY, "--release")).out == f"limit {KEY} is not held\n"
    assert await limit_line(rota, job) == ""

    await rota("limit", "set", "handler:h", "--max-running", 0)
    until = datetime.now(UTC) + timedelta(hours=1)
    await rota("limit", "hold", "queue:default", "--until", until.isoformat())
    text = await limit_line(rota, job)
    assert text.startswith(
        "waits for limit handler:h: paused (max_running 0), 1 ahead; and for limit queue:default: held"
    )
    assert (await rota("limit", "hold", KEY)).code == 2


async def test_a_job_is_enqueued_and_a_schedule_added_with_a_limit_key(rota: Shell, conn: Connection[Record]) -> None:
    """The column is that of the SQL functions."""
    assert (await rota("enqueue", "h", "--limit-key", KEY)).code == 0
    assert await conn.fetchval("select limit_key from rota.jobs") == KEY
    refused = await rota("enqueue", "h", "--limit-key", "queue:x")
    assert (refused.code, "limit_key must not begin with handler: or queue:" in refused.err) == (1, True), refused.err
    assert (await rota("schedule", "add", "s", "h", "--every", "1h", "--limit-key", KEY)).code == 0
    assert (await rota("schedule", "set", "s", "--limit-key", "b")).code == 0
    assert "limit key b" in (await rota("schedule", "show", "s")).out
    assert (await rota("schedule", "set", "s", "--default", "limit_key")).code == 0
    assert await conn.fetchval("select limit_key from rota.schedules") is None


async def test_show_describes_the_use_of_a_key(rota: Shell, conn: Connection[Record]) -> None:
    """A key without a limit, too."""
    job = await make_running_job(conn, limit_key=KEY)
    await make_jobs(conn, 2, limit_key=KEY)
    shown = (await rota("limit", "show", KEY)).out
    assert "none applies" in shown
    assert f"job {job.job_id}" in shown
    await rota("limit", "set", "tenant:*", "--max-running", 1)
    shown = (await rota("limit", "show", KEY)).out
    for text in ("1 running (of tenant:*)", f"closed: 1 of 1 running (job {job.job_id})", "2 due jobs"):
        assert text in shown
    asjson = (await rota("limit", "show", KEY, "--json")).json
    assert (asjson["open"], asjson["waiting"], asjson["holders"]) == (False, 2, [job.job_id])


async def test_each_role_may_do_its_part(tmp_path: Path, server: Server) -> None:
    """Operators change limits, daemons declare and prune them, clients choose keys."""
    (tmp_path / "shop.py").write_text(
        "import rota\napp = rota.App('shop')\n@app.handler('h', max_running=3)\nasync def h(job): ...\n"
    )
    async with role_database(server, "limits") as roles:
        operator, daemon, client = (
            Shell(tmp_path, {"DATABASE_URL": roles.dsn(name)}) for name in ("op", "node", "app")
        )

        async def run(shell: Shell, *arguments: object) -> str:
            result = await shell(*arguments)
            assert result.code == 0, result.err
            return result.out

        assert "limit" in await run(daemon, "schedule", "sync", "--app", "shop:app")
        job = (await run(client, "enqueue", "h", "--limit-key", KEY)).strip()
        await run(operator, "limit", "set", KEY, "--max-running", 0)
        await run(operator, "limit", "set", "handler:h", "--max-running", 5)
        await run(operator, "limit", "hold", "other", "--for", "1h")
        assert "handler:h" in await run(operator, "limit", "list")
        assert "paused (max_running 0)" in await run(operator, "limit", "show", KEY)
        assert "paused (max_running 0)" in await run(operator, "why", job)
        assert "limited" in await run(operator, "status")
        await run(operator, "limit", "remove", KEY)
        (tmp_path / "shop.py").write_text("import rota\napp = rota.App('shop')\n")
        assert "removed" in await run(daemon, "schedule", "sync", "--app", "shop:app", "--prune")
        assert (await client("limit", "set", KEY, "--max-running", 1)).code == 3


async def test_the_commands_of_the_page_run_as_printed(rota: Shell, conn: Connection[Record]) -> None:
    """Those with a placeholder in capitals are left out."""
    del conn
    text = page("limits")
    commands = re.findall(r"^(rota limit [^#\n]+)|`(rota limit [^`]+)`", text, re.MULTILINE)
    lines = [
        line for line in (first or second for first, second in commands) if not re.search(r"[A-Z]|limit \w+$", line)
    ]
    assert len(lines) >= 10
    for result in await asyncio.gather(*(rota(*shlex.split(line)[1:]) for line in lines)):
        assert result.code == 0, result.err
    (declaration,) = blocks(text, language="python")
    names: dict[str, Any] = {"app": App("shop"), "rota": sys.modules["rota"], "timedelta": timedelta}
    exec(declaration.text, names)
    assert names["app"].limits["handler:import"].columns == {"max_starts": 600, "per": "60 seconds"}
