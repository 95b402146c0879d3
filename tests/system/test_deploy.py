"""What stands in deploy/, taken at its word by the tools that will read it, and held against the code."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rota.config import load, parse_duration

if TYPE_CHECKING:
    from scenes import Scene

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "rota@.service"


def tool(name: str) -> str:
    """Return where a program is; skip the test where it isn't installed."""
    if found := shutil.which(name):
        return found
    pytest.skip(f"{name} is not installed here")


def said_by(*command: str | Path) -> str:
    """Run a command that must succeed, and return all it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------------------- systemd


def settings(name: str) -> list[str]:
    """All values of a setting of the unit."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    """A misspelt setting is a line in a journal that nobody reads, and then isn't in force."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "rota").symlink_to(shutil.which("true") or "/bin/true")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/rota/%i", str(venv)))
    assert said_by(tool("systemd-analyze"), "verify", "--man=no", copy) == ""


def test_the_unit_gives_a_daemon_the_time_it_needs_to_stop() -> None:
    """Killed before its drain is over, a daemon leaves jobs behind that wait for their leases to end."""
    environment = dict(line.split("=", 1) for line in settings("Environment"))
    (stop,) = settings("TimeoutStopSec")
    assert environment["ROTA_STOP_TIMEOUT"] == stop
    assert load(environ={"ROTA_STOP_TIMEOUT": stop}).warnings == ()
    drain = load(environ={}).drain
    assert parse_duration(stop) >= drain.timeout + drain.grace + timedelta(seconds=10)


def test_sigterm_reaches_the_daemon_and_no_shell() -> None:
    """B77: a wrapper as the main process keeps the signal to itself, and every stop is a kill."""
    (start,) = settings("ExecStart")
    assert start.split() == ["/opt/rota/%i/bin/rota", "run"]
    assert settings("KillMode") == ["mixed"]
    assert settings("Type") == ["notify"]


async def test_a_daemon_tells_systemd_how_it_is(scene: Scene, tmp_path: Path) -> None:
    """Without READY=1 a start is a time-out; the STATUS is what `systemctl status` shows."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(30)
        (tmp_path / "url").write_text(scene.dsn)
        daemon = scene.daemons.start(
            NOTIFY_SOCKET=str(address),
            WATCHDOG_USEC="200000",
            DATABASE_URL="",
            ROTA_DATABASE_URL_FILE=str(tmp_path / "url"),
        )
        ready = systemd.recv(1000).decode()
        assert re.fullmatch(r"READY=1\nSTATUS=up: 20 slots for \d+ handlers", ready)
        assert systemd.recv(1000) == b"WATCHDOG=1"
        assert daemon.stop() == 0
        systemd.setblocking(False)
        heard: list[str] = []
        while "STOPPING" not in (heard or [""])[-1]:
            heard.append(systemd.recv(1000).decode())
        assert heard[-1] == "STOPPING=1\nSTATUS=draining, 0 jobs at the start"
