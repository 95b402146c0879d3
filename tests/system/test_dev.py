"""`rota dev`: a server, a daemon and a prompt for the first job."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from command_line import Shell, running_command
from rota.embedded import EmbeddedPostgres, find_bindir
from rota.errors import NoPostgres
from servers import memory_folder
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY = "S3CRET-canary"

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.chain")
async def chain(job):
    left = job.payload["left"]
    if left:
        async with job.transaction() as conn:
            await rota.enqueue(conn, "shop.chain", {"left": left - 1})

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
def embedded_shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose embedded PostgreSQL uses a folder that the server's user can reach."""
    try:
        find_bindir()
    except NoPostgres as error:
        pytest.skip(str(error))
    (tmp_path / "shop.py").write_text(APP)
    with tempfile.TemporaryDirectory(prefix="rota-dev-", dir=memory_folder()) as folder:
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
async def test_dev_shows_the_traceback_of_a_failed_handler(embedded_shell: Shell, format: str) -> None:  # noqa: A002
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
async def test_a_second_dev_takes_the_server_over_when_the_first_ends(
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
