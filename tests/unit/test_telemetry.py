"""At which level each event is told: a warning is for somebody who then does something."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rota.observability.telemetry import Telemetry, make_logger

if TYPE_CHECKING:
    import pytest


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The events that were told since the last look."""
    out, err = capsys.readouterr()
    return [json.loads(line)["event"] for line in (out + err).splitlines()]


def test_a_listener_that_we_close_ourselves_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Every orderly stop would be one; a link that was cut is."""
    telemetry = Telemetry(make_logger(level="warning", format="json"))
    telemetry.listener_changed(up=True)
    telemetry.listener_changed(up=False)
    assert warnings(capsys) == []
    telemetry.listener_changed(up=False, why="connection terminated")
    assert warnings(capsys) == ["listener.down"]


def test_a_lost_job_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """A daemon that dies with a hundred jobs is a hundred lines, not two hundred."""
    telemetry = Telemetry(make_logger(level="warning", format="json"))
    telemetry.job_settled(
        job_id=1, handler="h", queue="q", settlement="retried", outcome="lost", attempt=1, seconds=None
    )
    telemetry.lease_reaped(job_id=1, handler="h", settlement="retried")
    assert warnings(capsys) == ["job.settled"]
