"""Log levels of events: a warning asks for action."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rota.observability.telemetry import Telemetry, make_logger

if TYPE_CHECKING:
    import pytest


def read_events(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the names of the events logged since the last call."""
    out, err = capsys.readouterr()
    return [json.loads(line)["event"] for line in (out + err).splitlines()]


def test_an_orderly_close_of_the_listener_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """A lost connection is one."""
    telemetry = Telemetry(make_logger(level="warning", format="json"))
    telemetry.listener_changed(up=True)
    telemetry.listener_changed(up=False)
    assert read_events(capsys) == []
    telemetry.listener_changed(up=False, why="connection terminated")
    assert read_events(capsys) == ["listener.down"]


def test_a_lost_job_logs_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The reaper must not add a second one."""
    telemetry = Telemetry(make_logger(level="warning", format="json"))
    telemetry.job_settled(
        job_id=1, handler="h", queue="q", settlement="retried", outcome="lost", attempt=1, seconds=None
    )
    telemetry.lease_reaped(job_id=1, handler="h", settlement="retried")
    assert read_events(capsys) == ["job.settled"]
