"""No log line, metric, traceback, query or output shows a payload or the password of a URL."""

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
    """Add a password to the URL; the tests' server does not ask for one."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"postgres:{PASSWORD}@{parts.netloc.rpartition('@')[2]}"))


def assert_has_no_secret(text: str, where: str) -> None:
    """Fail if the text contains a secret in upper or lower case."""
    for secret in (CANARY, PASSWORD):
        assert secret.lower() not in text.lower(), f"{secret} in {where}:\n{text}"


async def run_jobs_with_secrets(fleet: Fleet, daemon: DaemonProcess) -> dict[str, int]:
    """Run jobs with the secret to success, failure, timeout, a dead letter, a snooze and a database error."""
    secret = {"password": CANARY, "nested": [{"token": f"Bearer {CANARY}"}]}
    soon = {"backoff_base": "0.1 s", "backoff_cap": "0.1 s"}
    jobs = {
        "success": await fleet.enqueue("work", secret),
        "thread": await fleet.enqueue("thread", {**secret, "seconds": 0}),
        "failure": await fleet.enqueue("raises_payload", secret, max_attempts=2, **soon),
        "thread failure": await fleet.enqueue("thread", [CANARY], max_attempts=1),
        "timeout": await fleet.enqueue("work", {**secret, "seconds": 30}, timeout="0.3 s", max_attempts=1),
        "database": await fleet.enqueue("fails_in_database", {**secret, "seconds": 1.5}, max_attempts=1),
        "typed": await fleet.enqueue("typed", secret, max_attempts=1),
        "snooze": await fleet.enqueue("snoozes", {**secret, "times": 1}),
        "permanent": await fleet.enqueue("raises_permanent", secret),
        "process": await fleet.enqueue("apart", secret, max_attempts=1),
        "strays": await fleet.enqueue("raises_in_thread", secret),
        "strays of a process": await fleet.enqueue("raises_in_process_thread", secret),
    }

    async def find_statement() -> str | None:
        rows = await fleet.fetch("select query from pg_stat_activity where datname = current_database()")
        text = "\n".join(row["query"] for row in rows)
        return text if "pg_sleep" in text else None

    assert_has_no_secret(await eventually(find_statement, what="the handler's statement"), "pg_stat_activity")
    await fleet.wait_until_empty()
    assert daemon.alive
    return jobs


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_logs_metrics_pages_queries_and_output_show_no_secret(fleet: Fleet, log_format: str) -> None:
    """The log level is debug; commands show the payload only on request."""
    daemon = fleet.daemons.launch(
        dsn=with_password(fleet.dsn), ROTA_LOG_LEVEL="debug", ROTA_LOG_FORMAT=log_format, PYTHONASYNCIODEBUG="1"
    )
    await eventually(lambda: "node.started" in daemon.output_text(), within=20)
    jobs = await run_jobs_with_secrets(fleet, daemon)
    for page in ("metrics", "healthz", "readyz") if log_format == "json" else ():
        assert_has_no_secret(daemon.get(page)[1], page)

    errors = await fleet.fetch("select error_kind, error from rota.attempts where error is not null")
    assert len(errors) >= 7, "they failed as they were to"

    for row in errors:
        assert_has_no_secret(f"{row['error_kind']} {row['error']}", "rota.attempts")
    daemon.stop()
    result = daemon.output_text()
    assert "job.settled" in result
    assert result.count("loop.stray_error") == 2
    assert result.count("left running: ValueError") == 2

    assert_has_no_secret(result, "the daemon's log")
    if log_format == "console":
        return
    for command in COMMANDS:
        words = [word.format(failure=jobs["failure"], success=jobs["success"]) for word in command]
        shown = run_rota(*words, dsn=with_password(fleet.dsn))
        assert shown.returncode != 2, f"rota {' '.join(words)}: {shown.stdout}{shown.stderr}"
        assert_has_no_secret(shown.stdout + shown.stderr, f"rota {' '.join(words)}")


COMMANDS = [["config"], ["check"], ["status"], ["dead", "show", "{failure}"], ["job", "show", "{success}", "--json"]]
"""Some commands whose output people paste into tickets. test_job_commands.py runs the others on a job with a secret."""


async def test_a_url_that_does_not_work_is_shown_without_its_password(fleet: Fleet) -> None:
    daemon = fleet.daemons.launch(dsn=f"postgresql://someone:{PASSWORD}@127.0.0.1:1/none", ROTA_LOG_LEVEL="debug")

    assert daemon.wait_for_exit() == 3

    assert "someone" in daemon.output_text()
    assert_has_no_secret(daemon.output_text(), "the error")


async def test_a_crash_of_the_daemon_prints_no_secret(fleet: Fleet) -> None:
    """The traceback of a crashed loop has the place, without payload and URL."""
    daemon = fleet.daemons.start(dsn=with_password(fleet.dsn), ROTA_LOG_LEVEL="debug")
    job = await fleet.enqueue("work", {"password": CANARY, "seconds": 30})
    await fleet.wait_for_execution(job)
    # Without the schema, every loop fails.
    await fleet.execute("alter function rota.cancel rename to cancelled")
    await fleet.execute("alter table rota.jobs rename column fence_token to token")

    daemon.wait_for("loop.crashed")
    daemon.send(signal.SIGQUIT)
    daemon.wait_for_exit()

    result = daemon.output_text()
    assert "find_reaper_work" in result or "claim_due_jobs" in result, "the place"
    assert_has_no_secret(result, "the crash")


def run_rota(*words: str, dsn: str) -> subprocess.CompletedProcess[str]:
    """Run a rota command and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "rota", *words],
        env={**os.environ, "DATABASE_URL": dsn, "ROTA_APP": "process_app:app", "PYTHONPATH": "tests/support"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
