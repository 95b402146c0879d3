"""B103: what a payload or a URL holds is nobody's business: it is in no log line, metric, traceback, query text or output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import pytest

from waiting import eventually

if TYPE_CHECKING:
    from fleets import Fleet
    from processes import DaemonProcess

CANARY = "S3CRET-canary"
PASSWORD = "S3CRET-password"


def with_password(dsn: str) -> str:
    """The same way with a password, which the tests' server doesn't ask for."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"postgres:{PASSWORD}@{parts.netloc.rpartition('@')[2]}"))


def assert_silent(text: str, where: str) -> None:
    """No secret in there, whatever its case."""
    for secret in (CANARY, PASSWORD):
        assert secret.lower() not in text.lower(), f"{secret} in {where}:\n{text}"


async def through_everything(fleet: Fleet, daemon: DaemonProcess) -> dict[str, int]:
    """Send the canary through success, failure, timeout, dead letters, snoozes and a complaint of the database."""
    secret = {"password": CANARY, "nested": [{"token": f"Bearer {CANARY}"}]}
    soon = {"backoff_base": "0.1 s", "backoff_cap": "0.1 s"}
    jobs = {
        "success": await fleet.enqueue("work", secret),
        "thread": await fleet.enqueue("thread", {**secret, "seconds": 0}),
        "failure": await fleet.enqueue("tells", secret, max_attempts=2, **soon),
        "thread failure": await fleet.enqueue("thread", [CANARY], max_attempts=1),
        "timeout": await fleet.enqueue("work", {**secret, "seconds": 30}, timeout="0.3 s", max_attempts=1),
        "database": await fleet.enqueue("asks", {**secret, "seconds": 1.5}, max_attempts=1),
        "typed": await fleet.enqueue("typed", secret, max_attempts=1),
        "snooze": await fleet.enqueue("snoozes", {**secret, "times": 1}),
        "permanent": await fleet.enqueue("gives_up", secret),
        "process": await fleet.enqueue("apart", secret, max_attempts=1),
        "strays": await fleet.enqueue("strays", secret),
        "strays of a process": await fleet.enqueue("strays_apart", secret),
    }

    async def asking() -> str | None:
        rows = await fleet.fetch("select query from pg_stat_activity where datname = current_database()")
        text = "\n".join(row["query"] for row in rows)
        return text if "pg_sleep" in text else None

    assert_silent(await eventually(asking, what="the handler's statement"), "pg_stat_activity")
    await fleet.wait_until_empty()
    assert daemon.alive
    return jobs


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_b103_no_log_line_metric_page_query_or_output_shows_a_secret(fleet: Fleet, log_format: str) -> None:
    """At debug level, through every end that a job can come to, and in what the commands print unless asked for the payload."""
    daemon = fleet.daemons.launch(
        dsn=with_password(fleet.dsn), ROTA_LOG_LEVEL="debug", ROTA_LOG_FORMAT=log_format, PYTHONASYNCIODEBUG="1"
    )
    await eventually(lambda: "node.started" in daemon.said(), within=20)
    jobs = await through_everything(fleet, daemon)
    for page in ("metrics", "healthz", "readyz") if log_format == "json" else ():
        assert_silent(daemon.get(page)[1], page)

    errors = await fleet.fetch("select error_kind, error from rota.attempts where error is not null")
    assert len(errors) >= 7, "they failed as they were to"
    for row in errors:
        assert_silent(f"{row['error_kind']} {row['error']}", "rota.attempts")
    daemon.stop()
    said = daemon.said()
    assert "job.settled" in said
    assert said.count("loop.stray_error") == 2
    assert said.count("left running: ValueError") == 2
    assert_silent(said, "the daemon's log")
    if log_format == "console":
        return
    for command in COMMANDS:
        words = [word.format(failure=jobs["failure"], success=jobs["success"]) for word in command]
        shown = rota(*words, dsn=with_password(fleet.dsn))
        assert shown.returncode != 2, f"rota {' '.join(words)}: {shown.stdout}{shown.stderr}"
        assert_silent(shown.stdout + shown.stderr, f"rota {' '.join(words)}")


COMMANDS = [
    ["config"],
    ["check"],
    ["status"],
    ["status", "--json"],
    ["dead", "summary"],
    ["dead", "list"],
    ["dead", "list", "--json"],
    ["dead", "show", "{failure}"],
    ["job", "list"],
    ["job", "show", "{failure}"],
    ["job", "show", "{success}", "--json"],
]
"""What people look at, and paste into tickets."""


async def test_b103_a_url_that_does_not_work_is_shown_without_its_password(fleet: Fleet) -> None:
    """The first error that anybody sees has the URL in it."""
    daemon = fleet.daemons.launch(dsn=f"postgresql://somebody:{PASSWORD}@127.0.0.1:1/none", ROTA_LOG_LEVEL="debug")

    assert daemon.ends() == 3

    assert "somebody" in daemon.said()
    assert_silent(daemon.said(), "the error")


async def test_b103_a_crash_of_the_daemon_prints_no_secret(fleet: Fleet) -> None:
    """A crash of a loop is logged with a traceback: with the place, without the payload and the URL."""
    daemon = fleet.daemons.start(dsn=with_password(fleet.dsn), ROTA_LOG_LEVEL="debug")
    job = await fleet.enqueue("work", {"password": CANARY, "seconds": 30})
    await fleet.wait_for_execution(job)
    # No loop can do its work: the schema is taken away under it.
    await fleet.execute("alter function rota.cancel rename to cancelled")
    await fleet.execute("alter table rota.jobs rename column fence_token to token")

    daemon.wait_for("loop.crashed")
    daemon.send(signal.SIGQUIT)
    daemon.ends()

    said = daemon.said()
    assert "find_reaper_work" in said or "claim_due_jobs" in said, "the place"
    assert_silent(said, "the crash")


def rota(*words: str, dsn: str) -> subprocess.CompletedProcess[str]:
    """Run a command of rota as a person does."""
    return subprocess.run(
        [sys.executable, "-m", "rota", *words],
        env={**os.environ, "DATABASE_URL": dsn, "ROTA_APP": "process_app:app", "PYTHONPATH": "tests/support"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
