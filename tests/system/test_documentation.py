"""Every example of the README and of docs/ runs as printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import pytest

from command_line import Shell
from factories import make_dead_letters
from in_process_daemons import final_outcome, insert_job, run_node
from pages import blocks, page, pages
from role_logins import RoleDatabase, role_database
from rota.app import find_app
from rota.embedded import find_bindir
from rota.errors import NoPostgres
from servers import memory_folder
from waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from asyncpg import Connection, Record

    from servers import Database, Server

README = page("README")
SQL = page("sql")
INSTALL_AND_RUN_SECONDS = 120


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Shell]:
    """An empty folder with `.venv/bin/rota`. test_wheel.py tests the installation itself."""
    try:
        find_bindir()
    except NoPostgres as error:
        pytest.skip(str(error))
    bindir = tmp_path / ".venv" / "bin"
    bindir.mkdir(parents=True)
    (bindir / "rota").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rota "$@"\n')
    (bindir / "rota").chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="rota-readme-", dir=memory_folder()) as data:
        Path(data).chmod(0o755)
        yield Shell(tmp_path, {"ROTA_DATA_DIR": f"{data}/pg", "PYTHONUNBUFFERED": "1"})


@contextmanager
def run_until_ctrl_c(shell: Shell, line: str) -> Iterator[Callable[[], str]]:
    """Run a command that does not end by itself, yield its output, and press Ctrl-C at the end."""
    log = shell.folder / "terminal"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {line}"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=shell.environment(),
            cwd=shell.folder,
        )
    try:
        yield log.read_text
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()


def run_command(shell: Shell, line: str) -> str:
    """Run a command that must succeed and return its output."""
    done = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, env=shell.environment(), cwd=shell.folder, timeout=60, check=False
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout.decode()


def test_the_quickstart_leads_from_an_empty_folder_to_a_job_in_two_minutes(folder: Shell) -> None:
    """Each step is taken from the README, and each stated result must appear."""
    started_at = time.monotonic()
    install, dev, show = blocks(README, "The first five minutes", "sh")
    (app,) = blocks(README, "The first five minutes", "python")
    (insert,) = blocks(README, "The first five minutes", "sql")
    # Editable: a copy would replace the installation that `make` has made in a developer's checkout.
    assert "pip install -e '.[embedded]' -c deploy/constraints.txt" in install.text

    name = re.search(r"Write `(\S+)`", README)
    assert name
    (folder.folder / name[1]).write_text(app.text)

    with run_until_ctrl_c(folder, dev.text.strip()) as output:
        until(lambda: "node.started" in output(), within=60, what="the daemon")
        psql = re.search(r"open psql +(.*)", output())
        assert psql
        printed = run_command(folder, f"{psql[1]} -At -c {shlex.quote(insert.text.strip())}")
        assert printed.splitlines()[0] == "1"
        until(lambda: re.search(r"attempt 1 for order 7 key rota:", output()), what="the output of the handler")
        commands = [line for line in show.text.splitlines() if line]
        until(lambda: "succeeded" in run_command(folder, commands[1]), what="the job's end")
        shown = [run_command(folder, line) for line in commands]
        assert "default" in shown[0]
        assert "send_receipt" in shown[1]
        assert "succeeded" in shown[2]
    assert time.monotonic() - started_at < INSTALL_AND_RUN_SECONDS


def test_the_three_steps_with_an_existing_server_work(folder: Shell, server: Server) -> None:
    steps = "`export DATABASE_URL=postgresql://…`, run `rota migrate` once, and run `rota run --app myapp:app`"
    assert steps in " ".join(README.split())
    (app,) = blocks(README, "The first five minutes", "python")
    (insert,) = blocks(README, "The first five minutes", "sql")
    (folder.folder / "myapp.py").write_text(app.text)
    name = f"rota_readme_{os.getpid()}"
    psql = f"{shlex.quote(str(find_bindir() / 'psql'))}"
    run_command(folder, f"{psql} {shlex.quote(server.dsn)} -c 'create database {name}'")
    try:
        folder.environ["DATABASE_URL"] = server.dsn_for(name)
        run_command(folder, ".venv/bin/rota migrate")
        with run_until_ctrl_c(folder, ".venv/bin/rota run --app myapp:app") as output:
            until(lambda: "node.started" in output(), within=60, what="the daemon")
            run_command(folder, f'{psql} "$DATABASE_URL" -c {shlex.quote(insert.text.strip())}')
            until(lambda: "attempt 1 for order 7" in output(), what="the output of the handler")
    finally:
        run_command(folder, f"{psql} {shlex.quote(server.dsn)} -c 'drop database {name} with (force)'")


def test_the_quickstart_page_has_the_same_examples_as_the_readme() -> None:
    """The tests above run those of the README."""
    for block in blocks(README, "The first five minutes"):
        assert block in blocks(page("quickstart"), "The first five minutes")


def test_every_file_named_in_the_documentation_exists() -> None:
    root = Path(__file__).parents[2]
    for name, text in pages().items():
        for path in re.findall(r"`((?:src|sql|tests|deploy|docs)/[\w./@-]+)`", text):
            assert (root / path).exists(), (name, path)


def test_every_command_named_in_the_documentation_exists() -> None:
    from typer.main import get_command

    from rota.cli import app

    known: Any = get_command(app)
    text = "\n".join(pages().values())
    for words in re.findall(r"`(?:\.venv/bin/)?rota ([a-z-]+)(?: ([a-z-]+))?", text):
        first = known.commands.get(words[0])
        assert first is not None, words
        if hasattr(first, "commands") and words[1]:
            assert words[1] in first.commands, words
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target


async def test_the_example_with_a_transaction_runs(
    database: Database, conn: Connection[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the table from the SQL page."""
    pieces = [
        blocks(README, "The first five minutes", "python")[0],
        blocks(page("python"), "Write a handler", "python")[0],
    ]
    (tmp_path / "readme_app.py").write_text("\n\n".join(piece.text for piece in pieces))
    monkeypatch.syspath_prepend(tmp_path)
    await conn.execute(re.search(r"^create table orders .*;$", SQL, re.MULTILINE)[0])  # type: ignore[index]
    await conn.execute("insert into orders values (7)")

    async with run_node(database.dsn, find_app("readme_app:app")):
        charged = await insert_job(conn, "charge", '{"order": 7}')
        assert await final_outcome(conn, charged) == "succeeded"
        assert await conn.fetchval("select paid from orders where id = 7")
        receipt = await conn.fetchval("select max(job_id) from rota.job_status where handler = 'send_receipt'")
        assert await final_outcome(conn, receipt) == "succeeded"
        assert await final_outcome(conn, await insert_job(conn, "charge", '{"order": 8}')) == "dead: permanent"
        assert await final_outcome(conn, await insert_job(conn, "charge", '{"odrer": 8}')) == "dead: bad_payload"


@pytest.fixture
async def place(server: Server) -> AsyncIterator[RoleDatabase]:
    """A database with roles and a login that may create tables of its own, as an application does."""
    async with role_database(server, "readme") as jobs:
        async with jobs.connect() as root:
            await root.execute(f"grant create, usage on schema public to {jobs.prefix}_app, {jobs.prefix}_op")
        yield jobs


class Statement(NamedTuple):
    """One SQL statement, and the rows or the SQLSTATE and message that the page states."""

    text: str
    returns: list[str]


def parse_statements(block: str) -> list[Statement]:
    """Return the statements of a block with the results stated in the `--> …` lines below them."""
    found: list[Statement] = []
    text = ""
    for line in block.splitlines():
        if line.startswith("--> "):
            found[-1].returns.append(line.removeprefix("--> "))
        elif not line.startswith("--"):
            text += line + "\n"
            if line.rstrip().endswith(";"):
                found.append(Statement(text.strip(), []))
                text = ""
    assert not text.strip(), f"no semicolon: {text}"
    return found


def format_row(row: Record) -> str:
    """Format a row as the pages do."""
    words = {True: "true", False: "false", None: "null"}
    values = [words[value] if value is None or isinstance(value, bool) else str(value) for value in row.values()]
    return values[0] if len(values) == 1 else f"({', '.join(values)})"


async def run_block(conn: Connection[Record], block: str) -> int:
    """Run the statements of a block, compare their results, and return how many were compared."""
    result = 0
    for each in parse_statements(block):
        result += len(each.returns)
        if "$1" in each.text:
            await conn.prepare(each.text)
        elif each.returns and re.match(r"[0-9A-Z]{5}: ", each.returns[0]):
            code, _, message = each.returns[0].partition(": ")
            with pytest.raises(asyncpg.PostgresError) as refused:
                await conn.execute(each.text)
            assert refused.value.sqlstate == code, each.text
            assert message in {refused.value.args[0], getattr(refused.value, "constraint_name", None)}, each.text
        else:
            rows = await conn.fetch(each.text)
            if each.returns:
                assert [format_row(row) for row in rows] == each.returns, each.text
    return result


async def test_the_sql_page_returns_what_it_states(place: RoleDatabase) -> None:
    """Each statement runs as a login with only the role of a client or an operator."""
    async with place.connect("app") as app, place.connect("op") as op, place.connect() as root:
        result = 0
        for block in [
            block
            for heading in ("Insert jobs", "Errors", "Look up and cancel jobs")
            for block in blocks(SQL, heading, "sql")
        ]:
            result += await run_block(app, block.text)
        await root.execute("alter sequence rota.jobs_job_id_seq restart with 201")
        await make_dead_letters(root, 3, handler="charge", error_kind="BankTimeout")
        await make_dead_letters(
            root, 2, handler="charge", reason="permanent", error_kind="KeyError", payload='{"amount": 3}'
        )
        for block in blocks(SQL, "Functions for operators", "sql"):
            result += await run_block(op, block.text)
        assert result > 15

        mended = await root.fetch("select payload from rota.jobs where handler = 'charge' and payload ? 'currency'")
        assert len(mended) == 2


async def test_the_completion_counter_fires_once_when_all_jobs_are_done(place: RoleDatabase) -> None:
    (block,) = blocks(SQL, "When all jobs of a batch are done", "sql")
    create, count_down = parse_statements(block.text)
    async with place.connect("app") as app:
        await app.execute(create.text)
        await app.execute("insert into batch values (1, 3)")
        for remaining in (2, 1, 0):
            await app.execute(count_down.text)
            jobs = await app.fetchval("select count(*) from rota.jobs where handler = 'batch_done'")
            assert jobs == (1 if remaining == 0 else 0)


async def test_the_other_sql_examples_of_the_docs_run(place: RoleDatabase) -> None:
    (first,) = blocks(README, "rota", "sql")
    (login,) = blocks(SQL, "Roles", "sql")
    async with place.connect("app") as app, place.connect() as root:
        assert await run_block(app, first.text) == 0
        renamed = re.sub(r"\brota_client\b", f"{place.prefix}_client", login.text).replace(
            "role shop", f"role {place.prefix}_shop"
        )
        await root.execute(renamed)
        member = "select pg_has_role($1, $2, 'USAGE')"
        assert await root.fetchval(member, f"{place.prefix}_shop", f"{place.prefix}_client")


SELECT_FUNCTION_OID = "select min(oid::int8) from pg_proc where proname = $1 and pronamespace = 'rota'::regnamespace"
MAY_CALL = "select has_function_privilege($1::text, $2::int8::oid, 'EXECUTE')"
MAY_READ = "select has_table_privilege($1::text, $2::text, 'SELECT')"


async def test_the_table_of_roles_matches_the_granted_functions(place: RoleDatabase) -> None:
    table = SQL[SQL.index("## Roles") : SQL.index("- `rota_owner` owns")]
    checked = 0
    async with place.connect() as root:
        for line in table.splitlines():
            if not (line.startswith("|") and line.count("|") == 5):
                continue
            what, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            for name in re.findall(r"`rota\.(\w+)`", what):
                oid = await root.fetchval(SELECT_FUNCTION_OID, name)
                for role, cell in zip(("client", "operator", "daemon"), cells, strict=True):
                    query = (MAY_CALL, oid) if oid is not None else (MAY_READ, f"rota.{name}")
                    assert await root.fetchval(query[0], f"{place.prefix}_{role}", query[1]) is bool(cell), (name, role)
                    checked += 1

    assert checked > 40
