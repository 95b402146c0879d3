"""docs/json.md lists what each command prints with --json. Every command is run and compared with the page.

A failure shows the section as it should be.
"""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command
from typer.testing import CliRunner

from factories import make_dead_letter, make_dead_letters, make_handler, make_job, make_jobs, make_running_job
from rota.cli import app
from schedule_rows import make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest
    from asyncpg import Connection, Record

    from servers import Database

PAGE = Path(__file__).parents[2] / "docs" / "json.md"

APP = """
import rota

app = rota.App("shop", release="1")

@app.schedule("0 6 * * *", name="declared")
@app.handler("shop.ok", max_running=5)
async def ok(job):
    return {"n": 1}

@app.handler("shop.fails")
async def fails(job):
    raise ValueError("no")
"""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("migrate",),
    ("migrate", "--check"),
    ("config",),
    ("check",),
    ("status",),
    ("enqueue", "h", "{}", "--key", "k"),
    ("call", "shop.ok"),
    ("call", "shop.fails"),
    ("job", "list", "--limit", "1000"),
    ("job", "show", "$done", "--payload", "--errors"),
    ("job", "show", "$running"),
    ("job", "show", "$dead", "--payload"),
    ("job", "show", "$limited"),
    ("job", "cancel", "$job"),
    ("job", "cancel", "--queue", "nobody", "--dry-run"),
    ("job", "cancel", "--queue", "nobody"),
    ("job", "retry-now", "--all"),
    ("job", "reschedule", "$other", "--in", "1h"),
    ("queue", "list"),
    ("queue", "pause", "mail", "--note", "x"),
    ("queue", "list"),
    ("queue", "resume", "mail"),
    ("handler", "list"),
    ("handler", "pause", "h", "--note", "x"),
    ("handler", "list"),
    ("handler", "resume", "h"),
    ("limit", "set", "other", "--max-running", "1", "--note", "x"),
    ("limit", "set", "tenant:*", "--weight", "3"),
    ("limit", "list"),
    ("limit", "show", "tenant:42"),
    ("limit", "show", "free"),
    ("limit", "hold", "tenant:42", "--release"),
    ("limit", "hold", "tenant:42", "--for", "1h"),
    ("limit", "remove", "other"),
    ("limit", "set", "tenant:42", "--max-running", "1"),
    ("limit", "remove", "tenant:42"),
    ("node", "list"),
    ("node", "forget", "$lost"),
    ("schedule", "add", "new", "h", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin"),
    ("schedule", "add", "later", "h", "--every", "1h", "--paused"),
    ("schedule", "set", "new", "--owner", "ann"),
    ("schedule", "list"),
    ("schedule", "show", "s", "--payload"),
    ("schedule", "show", "new"),
    ("schedule", "preview", "new", "--after", "2026-10-24T12:00:00Z", "--count", "3"),
    ("schedule", "pause", "new"),
    ("schedule", "resume", "new"),
    ("schedule", "pause", "--name", "new", "--dry-run"),
    ("schedule", "pause", "--name", "new"),
    ("schedule", "resume", "--name", "new", "--dry-run"),
    ("schedule", "resume", "--name", "new"),
    ("schedule", "run-now", "new"),
    ("schedule", "sync"),
    ("schedule", "backfill", "s", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-03T00:00:00Z", "--dry-run"),
    ("schedule", "backfill", "s", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-03T00:00:00Z"),
    ("schedule", "remove", "later"),
    ("cron", "next", "30 2 * * *", "--timezone", "Europe/Berlin", "--after", "2026-10-24T12:00:00Z"),
    ("cron", "explain", "0 6 * * *"),
    ("dead", "summary"),
    ("dead", "list"),
    ("dead", "show", "$dead", "--payload", "--errors"),
    ("dead", "redrive", "$dead", "--dry-run"),
    ("dead", "redrive", "--all", "--dry-run"),
    ("dead", "redrive", "$dead"),
    ("dead", "discard", "--all", "--note", "x", "--dry-run"),
    ("dead", "discard", "--all", "--note", "x"),
    ("why", "s"),
    ("why", "s", "--at", "2026-07-01T00:00:00Z"),
    ("why", "new", "--at", "2026-10-25T02:30:00"),
    ("why", "$fire"),
)

OPAQUE_KEYS = {"payload", "result", "meta", "checkpoint", "declared", "handlers", "slots", "values", "sources", "jobs"}
"""Keys whose values are not documented further: the user chooses what is in them, or their items are plain."""


def shape(value: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, type) for each part of a JSON value."""
    match value:
        case _ if name in OPAQUE_KEYS and isinstance(value, dict):
            yield path, "object"
        case dict():
            if path:
                yield path, "object"
            for key, item in value.items():
                yield from shape(item, f"{path}.{key}" if path else key, key)
        case list():
            yield path or ".", "list"
            for item in value:
                yield from shape(item, f"{path}[]", name)
        case None:
            yield path, "null"
        case bool():
            yield path, "boolean"
        case int() | float():
            yield path, "number"
        case _:
            yield path, "text"


def documented_types() -> dict[str, dict[str, set[str]]]:
    """Return command -> path -> types, from the page."""
    page = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## rota ", page, flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: {
            found[1]: set(found[2].split(" or "))
            for found in re.finditer(r"^- `(.+?)`: ([a-z ]+)$", section, re.MULTILINE)
        }
        for section in sections
    }


def format_lines(types: dict[str, set[str]]) -> str:
    """Return the lines of a section of the page."""
    order = ("object", "list", "text", "number", "boolean", "null")
    return "\n".join(f"- `{path}`: {' or '.join(sorted(kinds, key=order.index))}" for path, kinds in types.items())


def json_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield each command that accepts --json."""
    for name, each in getattr(command, "commands", {}).items():
        yield from json_commands(each, (*path, name))
    if any("--json" in option.opts for option in command.params):
        yield " ".join(path)


async def _fill_database(conn: Connection[Record]) -> dict[str, str]:
    """Insert rows of every kind and return the arguments for the commands."""
    await make_handler(conn, "h", queue="default")
    insert = (
        "insert into rota.nodes "
        "(node_id, host, pid, rota_version, app, release, handlers, queues, slots, tzdata, started_at, seen_at) "
        "values (gen_random_uuid(), 'here', 1, '0.1', 'shop', 'r7', '{h}', '{default}', '{\"default\": 5}', '2026a', "
        "now() - interval '1 hour', now() + $1::interval) returning node_id::text"
    )
    await conn.fetchval(insert, timedelta(hours=1))
    lost = await conn.fetchval(insert, timedelta(minutes=-5))
    schedule = await make_schedule(conn, "s", cron="0 0 * * *", owner="ann", expect_success_within=timedelta(hours=1))
    await conn.execute(
        "update rota.schedule_definitions set created_at = '2025-01-01', edited_at = '2025-01-01' where schedule_id = $1",
        schedule,
    )
    (job,) = await make_jobs(conn, 1)
    (fire,) = await make_jobs(conn, 1, schedule_id=schedule)
    await conn.execute(
        "insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id, missed_from, missed_count) values "
        "('2026-07-01', $1, 's', 'enqueued', $2, null, null), ('2026-07-05', $1, 's', 'skipped_misfire', null, '2026-07-02', 4)",
        schedule,
        fire.job_id,
    )
    await conn.execute("update rota.jobs set scheduled_for = '2026-07-01' where job_id = $1", fire.job_id)
    other = await make_job(conn, run_at=timedelta(hours=1))
    retrying = await make_job(conn, run_at=timedelta(hours=1), attempt=2)
    running = await make_running_job(conn, progress=0.5, progress_note="half")
    await conn.execute(
        "select rota.set_limit('tenant:*', 1, 1, interval '1 hour', 2, 'fair'); "
        "insert into rota.limits (key, max_running, declared_by) values ('queue:default', 9, 'shop'); "
        "insert into rota.limit_starts values ('tenant:42', 1, now()); "
        "select rota.hold_limit('tenant:42', now() + interval '1 hour', 'x')"
    )
    (limited,) = await make_jobs(conn, 1, limit_key="tenant:42")
    await make_running_job(conn, limit_key="tenant:42")
    dead = await make_dead_letter(conn, reason="exhausted", error_kind="E", error="e")
    await make_dead_letters(conn, 2, handler="once", delivery="at_most_once")
    done = 10_001
    await conn.execute(
        "insert into rota.job_runs "
        "(job_id, schedule_id, scheduled_for, handler, queue, outcome, attempts, finished_at, result, meta) "
        "values ($1, $2, now(), 'h', 'default', 'succeeded', 1, now(), '{\"n\": 1}', '{}')",
        done,
        schedule,
    )
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome, error_kind, error, started_at) "
        "values ($1, 900, 1, 'failed', 'E', 'e', now())",
        done,
    )
    ids: dict[str, Any] = {
        "job": job,
        "other": other,
        "retrying": retrying,
        "running": running,
        "fire": fire,
        "limited": limited,
    }
    return {"lost": lost, "done": str(done), "dead": str(dead)} | {name: str(each.job_id) for name, each in ids.items()}


async def test_the_json_of_each_command_matches_the_page(
    tmp_path: Path, database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key has a documented type, and each documented key is printed in at least one run."""
    (tmp_path / "json_shop.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = await _fill_database(conn)
    environ = {"DATABASE_URL": database.dsn, "ROTA_APP": "json_shop:app"}
    seen: dict[str, dict[str, set[str]]] = {}

    def run(arguments: Iterable[str]) -> Any:
        return CliRunner().invoke(app, [*arguments, "--json"], env=environ, catch_exceptions=False)

    for command in COMMANDS:
        arguments = [names[each[1:]] if each.startswith("$") else each for each in command]
        result = await asyncio.to_thread(run, arguments)
        assert result.exit_code in {0, 1}, f"{command}: {result.output}"
        heading = next(name for name in _ALL_COMMANDS if " ".join(command).startswith(name))
        types = seen.setdefault(heading, {})
        for path, kind in shape(json.loads(result.stdout)):
            types.setdefault(path, set()).add(kind)

    assert seen.keys() == set(_ALL_COMMANDS), "commands that take --json and are not run here"

    page = documented_types()
    missing = []
    for heading, types in seen.items():
        documented = page.get(heading, {})
        wider = {path: kinds | documented.get(path, set()) for path, kinds in types.items()}
        if documented != wider:
            missing.append(f"## rota {heading}\n\n{format_lines(wider)}")
    assert not missing, "docs/json.md:\n" + "\n\n".join(missing)
    assert page.keys() == set(_ALL_COMMANDS)


_ALL_COMMANDS = sorted({*json_commands(get_command(app))} - {"demo"}, key=len, reverse=True)
"""Without `rota demo`, which takes a minute."""
