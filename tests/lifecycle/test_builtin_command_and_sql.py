"""The built-in handlers command and sql."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, run_node, wait_for_claim
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database


async def _result(conn: Connection[Record], job_id: int) -> Any:
    return json.loads(await conn.fetchval("select result from rota.job_runs where job_id = $1", job_id))


def _python(code: str, **others: Any) -> dict[str, Any]:
    return {"x": {"argv": [sys.executable, "-c", code], **others}}


async def test_a_command_reads_the_payload_from_stdin_and_its_output_is_the_result(
    database: Database, conn: Connection[Record]
) -> None:
    """It runs without a shell, and only the configured variables of the environment reach it."""
    code = (
        "import sys, os, json; print(json.dumps([json.load(sys.stdin), os.environ['OWN'], os.environ['ROTA_ATTEMPT'], "
        "'DATABASE_URL' in os.environ]))"
    )
    os.environ["DATABASE_URL"] = "postgresql://secret"
    try:
        async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, env={"OWN": "1"})):
            job_id = await insert_job(conn, "command.x", '{"a": "$(id); `id`"}')
            assert await final_outcome(conn, job_id) == "succeeded"
    finally:
        del os.environ["DATABASE_URL"]
    result = await _result(conn, job_id)
    assert result["exit_code"] == 0
    assert json.loads(result["output"]) == [{"a": "$(id); `id`"}, "1", "1", False]


@pytest.mark.parametrize(
    ("code", "how", "text"),
    [
        ("import sys; sys.stderr.write('because'); sys.exit(3)", "dead: permanent", "exit code 3: because"),
        ("import sys; sys.exit(75)", "dead: exhausted", "exit code 75"),
        ("import os; os.kill(os.getpid(), 9)", "dead: exhausted", "ended with signal SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "dead: exhausted", "ended with signal 35"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)", "succeeded", ""),
    ],
)
async def test_the_exit_code_or_signal_of_a_command_decides_the_outcome_of_its_job(
    code: str, how: str, text: str, database: Database, conn: Connection[Record]
) -> None:
    """B91: output of any bytes does not prevent the settlement."""
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, permanent=[3])):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == how
    if text:
        assert text in (await dead_letter(conn, job_id))["error"]


@pytest.mark.parametrize("byte", ["\\xff", "\\x00", "\\x01", "\\x1b", "\\n", '"', "\\\\"])
async def test_b91_the_end_of_a_commands_output_is_stored_whatever_its_bytes(
    byte: str, database: Database, conn: Connection[Record]
) -> None:
    """The output is stored escaped and shortened, because escaping could make it longer than a result may be."""
    code = f"import sys; sys.stdout.buffer.write(b'{byte}' * 9000)"
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code)):
        job_id = await insert_job(conn, "command.x")
        assert await final_outcome(conn, job_id) == "succeeded"
    result = await _result(conn, job_id)
    assert result["exit_code"] == 0
    assert len(result["output"]) >= 1000


async def test_a_missing_program_fails_the_attempt_and_is_named_in_the_error(
    database: Database, conn: Connection[Record]
) -> None:
    async with run_node(database.dsn, rota.App("a"), handlers__command={"x": {"argv": ["/no/such/thing"]}}):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == "dead: exhausted"
    assert "/no/such/thing" in (await dead_letter(conn, job_id))["error"]


async def test_a_cancelled_command_is_ended_with_all_its_children(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """The process group gets SIGTERM, then SIGKILL after the grace, so that nothing runs beside the next attempt."""
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(600)\n"
    )

    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, grace="200ms")) as node:
        job_id = await insert_job(conn, "command.x")
        await eventually(pids.exists, what="the command's children")
        await conn.execute("select rota.cancel($1)", job_id)
        assert await final_outcome(conn, job_id) == "cancelled"
        for pid in map(int, pids.read_text(encoding="ascii").split()):
            await _wait_for_end_of(pid)
        assert not node.events_named("handler.stuck")


async def _wait_for_end_of(pid: int) -> None:
    await eventually(lambda: not _is_alive(pid), what="the end of the command")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _create_restricted_role(conn: Connection[Record], database: Database) -> str:
    await conn.execute(
        f"""
        drop role if exists low_{database.name};
        create role low_{database.name} login;
        create table effects (n int);
        grant insert on effects to low_{database.name};
        grant usage on schema rota to low_{database.name};
        grant execute on function rota.complete to low_{database.name};
        """
    )
    return database.dsn.replace("//postgres@", f"//low_{database.name}@")


async def test_a_statement_commits_together_with_its_job_and_with_the_rights_of_its_own_login(
    database: Database, conn: Connection[Record]
) -> None:
    """It cannot use the rights of the daemon's login."""
    url = await _create_restricted_role(conn, database)
    statements = {
        "add": {"statement": "insert into effects select ($1::jsonb ->> 'n')::int", "url": url},
        "peek": {"statement": "select count(*) from rota.jobs", "url": url},
        "analyze": {"statement": "analyze", "url": url, "transaction": False},
    }
    try:
        async with run_node(database.dsn, rota.App("a"), handlers__sql=statements):
            good = await insert_job(conn, "sql.add", '{"n": 7}')
            bad = await insert_job(conn, "sql.add", '{"n": "S3CRET"}')
            peek = await insert_job(conn, "sql.peek", max_attempts=1)
            analyze = await insert_job(conn, "sql.analyze")
            assert await final_outcome(conn, good) == "succeeded"
            assert await final_outcome(conn, bad) == "dead: permanent"
            assert await final_outcome(conn, peek) == "dead: exhausted"
            assert await final_outcome(conn, analyze) == "succeeded"
        assert await conn.fetchval("select n from effects") == 7
        assert await _result(conn, good) == {"status": "INSERT 0 1"}
        assert "S3CRET" not in (await dead_letter(conn, bad))["error"]
        assert "permission denied" in (await dead_letter(conn, peek))["error"]
        assert not await failed_attempts(conn, good)
    finally:
        await conn.execute(f"drop owned by low_{database.name}; drop role low_{database.name}")


async def test_a_cancelled_statement_is_cancelled_on_the_server_too(
    database: Database, conn: Connection[Record]
) -> None:
    """Otherwise it would keep its locks after the job has ended."""
    url = await _create_restricted_role(conn, database)
    try:
        async with run_node(
            database.dsn, rota.App("a"), handlers__sql={"x": {"statement": "select pg_sleep(600)", "url": url}}
        ):
            job_id = await insert_job(conn, "sql.x")
            await wait_for_claim(conn, job_id)
            sleeping = (
                "select count(*) = $1 from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'"
            )

            async def sleeps(count: int) -> bool:
                return bool(await conn.fetchval(sleeping, count))

            await eventually(lambda: sleeps(1), what="the statement")
            await conn.execute("select rota.cancel($1)", job_id)
            assert await final_outcome(conn, job_id) == "cancelled"
            await eventually(lambda: sleeps(0), what="the statement's end")
    finally:
        await conn.execute(f"drop owned by low_{database.name}; drop role low_{database.name}")


async def test_a_command_ends_with_its_daemon_when_that_is_killed() -> None:
    """Otherwise the command would run beside the next attempt. The kernel ends it with its parent."""
    if sys.platform != "linux":
        pytest.skip("only Linux can")

    from rota.builtin.command import _argv

    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, sys, subprocess\n"
        "argv = [str(os.getpid()) if part == '@' else part for part in sys.argv[1:]]\n"
        "child = subprocess.Popen(argv)\nprint(child.pid, flush=True)\nchild.wait()",
        *[part if part != str(os.getpid()) else "@" for part in _argv(["sleep", "600"])],
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())

    def sleeps() -> bool:
        with open(f"/proc/{pid}/comm", encoding="ascii") as comm:  # noqa: PTH123
            return comm.read().strip() == "sleep"

    await eventually(sleeps, what="the command")
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await _wait_for_end_of(pid)
