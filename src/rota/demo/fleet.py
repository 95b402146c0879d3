"""Three daemons as real processes, and whoever starts a killed one again, as systemd would."""

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

from rota.demo.records import lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEASE = 3.0
REAP_INTERVAL = 0.5
POLL_INTERVAL = 0.2
RESTART_AFTER = 1.0
GLANCE = 0.02

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

OFTEN_ENOUGH = 8
"""A daemon that had to be started so often is broken, and not the victim of a demo."""


BEARABLE = LEASE / 2
"""For how many seconds the machine may stand still; after that, living daemons lose leases, as they should."""


class DemoFailed(Exception):
    """Something did not go as promised; the message says what, for whoever watches."""


@dataclass(slots=True)
class Life:
    """One process of a daemon, from its start to its end, on the machine's clock."""

    name: str
    pid: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    end: str = ""


@dataclass(slots=True)
class Daemon:
    """A daemon by its letter, through all its lives: the second life of A is A2."""

    letter: str
    log: Path
    state: str = "starting"
    lives: list[Life] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def life(self) -> Life:
        """The current life, or the last one."""
        return self.lives[-1]

    @property
    def name(self) -> str:
        """What the current life is called."""
        return self.life.name

    @property
    def lives_now(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self.process is not None and self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """Read what it has logged in all its lives."""
        return lines_of(self.log)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        if self.process is not None:
            self.process.send_signal(number)


class Fleet:
    """The daemons, and the only one who starts, kills, stops and continues them: by the process that it started itself."""

    def __init__(self, folder: Path, dsn: str, letters: Sequence[str] = "ABC") -> None:
        self._folder = folder
        theirs = ("ROTA_", "PG", "DATABASE_URL")
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)} | {
            **SETTINGS,
            "DATABASE_URL": dsn,
            "DEMO_FOLDER": str(folder),
        }
        self._ending = False
        self.stood_still = 0.0
        """The longest time, in seconds, for which the machine gave us no turn."""
        self.daemons = [Daemon(letter, folder / f"{letter}.log") for letter in letters]

    def __getitem__(self, letter: str) -> Daemon:
        return next(daemon for daemon in self.daemons if daemon.letter == letter)

    def start(self, daemon: Daemon) -> None:
        """Begin a life."""
        number = len(daemon.lives) + 1
        with daemon.log.open("ab") as log:
            daemon.process = self._spawn(log)
        name = daemon.letter if number == 1 else f"{daemon.letter}{number}"
        daemon.lives.append(Life(name, daemon.process.pid, time.time()))
        daemon.state = "starting"

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  our own interpreter and our own arguments
            [sys.executable, *RUN],
            cwd=self._folder,  # no rota.toml of somebody else
            env=self._environment,
            stdin=subprocess.PIPE,  # never written to: that it ends tells the daemon that we are gone
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is for us
        )

    async def keep(self) -> None:
        """Notice who has died; start again whom SIGKILL has ended. Raises DemoFailed for any other end."""
        while not self._ending:
            for daemon in [daemon for daemon in self.daemons if daemon.lives]:
                self._notice_the_end_of(daemon)
                ended_at = daemon.life.ended_at
                if ended_at is not None and time.time() - ended_at >= RESTART_AFTER and not self._ending:
                    if len(daemon.lives) >= OFTEN_ENOUGH:
                        raise DemoFailed(f"daemon {daemon.letter} has died {len(daemon.lives)} times")
                    self.start(daemon)
            slept_at = time.monotonic()
            await asyncio.sleep(GLANCE)
            self.stood_still = max(self.stood_still, time.monotonic() - slept_at - GLANCE)

    def kill(self, daemon: Daemon) -> float:
        """Send kill -9, and return when its process had ended."""
        daemon.signal(signal.SIGKILL)
        if daemon.process is not None:
            daemon.process.wait()
        self._notice_the_end_of(daemon, "kill -9")
        return daemon.life.ended_at or time.time()

    def pause(self, daemon: Daemon) -> float:
        """Send SIGSTOP, and return when."""
        daemon.signal(signal.SIGSTOP)
        daemon.state = "stopped"
        return time.time()

    def resume(self, daemon: Daemon) -> float:
        """Send SIGCONT, and return when."""
        now = time.time()
        daemon.state = "running"
        daemon.signal(signal.SIGCONT)
        return now

    async def stop(self, within: float) -> None:
        """Ask all to stop, as a deployment does, and wait for it. Raises DemoFailed where one doesn't."""
        self._ending = True
        for daemon in self.daemons:
            daemon.state = "draining"
            daemon.signal(signal.SIGTERM)
        deadline = time.monotonic() + within
        while any(daemon.lives_now for daemon in self.daemons):
            if time.monotonic() > deadline:
                late = ", ".join(daemon.letter for daemon in self.daemons if daemon.lives_now)
                raise DemoFailed(f"{late} did not stop within {within:g} s of SIGTERM")
            await asyncio.sleep(GLANCE)
        for daemon in self.daemons:
            self._notice_the_end_of(daemon, "stopped")

    def end(self) -> None:
        """End whatever is left of them, now."""
        self._ending = True
        for daemon in self.daemons:
            if daemon.lives_now and daemon.process is not None:
                daemon.signal(signal.SIGKILL)
                daemon.signal(signal.SIGCONT)
                daemon.process.wait()
            if daemon.process is not None and daemon.process.stdin is not None:
                daemon.process.stdin.close()

    def _notice_the_end_of(self, daemon: Daemon, end: str = "died") -> None:
        if not daemon.lives:
            return
        life = daemon.life
        if life.ended_at is not None or daemon.lives_now or daemon.process is None:
            return
        life.ended_at, life.exit_code, life.end = time.time(), daemon.process.returncode, end
        daemon.state = "ended" if end == "stopped" else "killed"
        if daemon.process.stdin is not None:
            daemon.process.stdin.close()
        if life.exit_code != -signal.SIGKILL and end != "stopped":
            raise DemoFailed(
                f"daemon {life.name} (pid {life.pid}) has ended by itself, with exit code {life.exit_code}"
            )

    def tails(self, lines: int = 12) -> dict[str, list[str]]:
        """Return the ends of the logs."""
        tails: dict[str, list[str]] = {}
        for daemon in self.daemons:
            with suppress(FileNotFoundError):
                tails[daemon.letter] = daemon.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        return tails
