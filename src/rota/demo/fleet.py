"""Run the three daemons as real processes, and restart a killed one, as systemd would."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from rota.demo.json_lines import read_json_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEASE = 3.0
"""In seconds, like all constants here."""
REAP_INTERVAL = 0.5
POLL_INTERVAL = 0.2
RESTART_AFTER = 1.0
CHECK_INTERVAL = 0.02

RUN = ("-m", "rota", "run", "--app", "rota.demo.app:app")

SETTINGS = {
    "ROTA_LEASE": f"{LEASE:g}s",
    "ROTA_LEASE_REAP_INTERVAL": f"{REAP_INTERVAL:g}s",
    "ROTA_POLL_INTERVAL": f"{POLL_INTERVAL:g}s",
    "ROTA_QUEUES": "default:10,slow:2,reports:1",
    "ROTA_HTTP_PORT": "0",
    "ROTA_LOG_FORMAT": "json",
    "ROTA_LOG_LEVEL": "info",
}

MAX_STARTS = 8
"""A daemon with more processes than this is broken: the demo does not kill it that often."""

MAX_STALL = LEASE / 2
"""If the machine does not run the demo for longer, living daemons may lose leases too, and promises may not hold."""


class DemoFailed(Exception):
    """The demo can't continue. The message gives the cause."""


@dataclass(slots=True)
class Life:
    """One process of a daemon, from start to end. Instants are seconds on the machine's clock."""

    name: str
    pid: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    end: str = ""


@dataclass(slots=True)
class Daemon:
    """A daemon with all its processes: the second process of A is named A2."""

    letter: str
    log: Path
    state: str = "starting"
    lives: list[Life] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def life(self) -> Life:
        """The current process, or the last one."""
        return self.lives[-1]

    @property
    def name(self) -> str:
        """The name of the current process."""
        return self.life.name

    @property
    def is_alive(self) -> bool:
        """Whether its process exists, paused or not."""
        return self.process is not None and self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """Return the log lines of all its processes."""
        return read_json_lines(self.log)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still exists."""
        if self.process is not None:
            self.process.send_signal(number)


class Fleet:
    """Starts, kills, pauses and stops the daemons. Signals go only to processes that it has started itself."""

    def __init__(self, folder: Path, dsn: str, letters: Sequence[str] = "ABC") -> None:
        self._folder = folder
        user_settings = ("ROTA_", "PG", "DATABASE_URL")
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(user_settings)
        } | {
            **SETTINGS,
            "DATABASE_URL": dsn,
            "DEMO_FOLDER": str(folder),
        }
        self._ending = False
        self.longest_stall = 0.0
        """The longest time in seconds for which the machine did not run this process."""
        self.daemons = [Daemon(letter, folder / f"{letter}.log") for letter in letters]

    def __getitem__(self, letter: str) -> Daemon:
        return next(daemon for daemon in self.daemons if daemon.letter == letter)

    def start(self, daemon: Daemon) -> None:
        """Start a process for the daemon."""
        number = len(daemon.lives) + 1
        with daemon.log.open("ab") as log:
            daemon.process = self._spawn(log)
        name = daemon.letter if number == 1 else f"{daemon.letter}{number}"
        daemon.lives.append(Life(name, daemon.process.pid, time.time()))
        daemon.state = "starting"

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  our own interpreter and our own arguments
            [sys.executable, *RUN],
            cwd=self._folder,  # so that no rota.toml of the user is read
            env=self._environment,
            stdin=subprocess.PIPE,  # never written to: when it closes, the daemon knows that the demo has ended
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C must reach only the demo
        )

    async def restart_killed(self) -> None:
        """Restart daemons that were killed by SIGKILL, until stop() is called. Raises DemoFailed if one ends in another way."""
        while not self._ending:
            for daemon in [daemon for daemon in self.daemons if daemon.lives]:
                self._record_end(daemon)
                ended_at = daemon.life.ended_at
                if ended_at is not None and time.time() - ended_at >= RESTART_AFTER and not self._ending:
                    if len(daemon.lives) >= MAX_STARTS:
                        raise DemoFailed(f"daemon {daemon.letter} has ended {len(daemon.lives)} times")
                    self.start(daemon)
            slept_at = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL)
            self.longest_stall = max(self.longest_stall, time.monotonic() - slept_at - CHECK_INTERVAL)

    def kill(self, daemon: Daemon) -> float:
        """Send SIGKILL, wait for the process to end, and return the time of its end."""
        daemon.signal(signal.SIGKILL)
        if daemon.process is not None:
            daemon.process.wait()
        self._record_end(daemon, "kill -9")
        return daemon.life.ended_at or time.time()

    def pause(self, daemon: Daemon) -> float:
        """Send SIGSTOP, and return the time."""
        daemon.signal(signal.SIGSTOP)
        daemon.state = "stopped"
        return time.time()

    def resume(self, daemon: Daemon) -> float:
        """Send SIGCONT, and return the time."""
        now = time.time()
        daemon.state = "running"
        daemon.signal(signal.SIGCONT)
        return now

    async def stop(self, within: float) -> None:
        """Send SIGTERM to all daemons and wait for their end. Raises DemoFailed if one still runs after `within` seconds."""
        self._ending = True
        for daemon in self.daemons:
            daemon.state = "draining"
            daemon.signal(signal.SIGTERM)
        deadline = time.monotonic() + within
        while any(daemon.is_alive for daemon in self.daemons):
            if time.monotonic() > deadline:
                alive = ", ".join(daemon.letter for daemon in self.daemons if daemon.is_alive)
                raise DemoFailed(f"{alive} did not stop within {within:g} s of SIGTERM")
            await asyncio.sleep(CHECK_INTERVAL)
        for daemon in self.daemons:
            self._record_end(daemon, "stopped")

    def kill_all(self) -> None:
        """Kill all daemons that still run."""
        self._ending = True
        for daemon in self.daemons:
            if daemon.is_alive and daemon.process is not None:
                daemon.signal(signal.SIGKILL)
                daemon.signal(signal.SIGCONT)
                daemon.process.wait()
            if daemon.process is not None and daemon.process.stdin is not None:
                daemon.process.stdin.close()

    def _record_end(self, daemon: Daemon, end: str = "died") -> None:
        if not daemon.lives:
            return
        life = daemon.life
        if life.ended_at is not None or daemon.is_alive or daemon.process is None:
            return
        life.ended_at, life.exit_code, life.end = time.time(), daemon.process.returncode, end
        daemon.state = "ended" if end == "stopped" else "killed"
        if daemon.process.stdin is not None:
            daemon.process.stdin.close()
        if life.exit_code != -signal.SIGKILL and end != "stopped":
            raise DemoFailed(f"daemon {life.name} (pid {life.pid}) ended unexpectedly with exit code {life.exit_code}")

    def tails(self, lines: int = 12) -> dict[str, list[str]]:
        """Return the last lines of each daemon's log."""
        tails: dict[str, list[str]] = {}
        for daemon in self.daemons:
            with suppress(FileNotFoundError):
                tails[daemon.letter] = daemon.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        return tails
