"""Daemons as real processes: start, signal and stop them, and read their logs, pages and metrics."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import rota
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TESTS = Path(__file__).resolve().parent

SOURCE = Path(rota.__file__).resolve().parent.parent
"""The folder from which this process imports rota. The daemons import it from there too."""

SHORT_SETTINGS = {
    "ROTA_LEASE": "3s",
    "ROTA_LEASE_REAP_INTERVAL": "500ms",
    "ROTA_POLL_INTERVAL": "200ms",
    "ROTA_DRAIN_TIMEOUT": "10s",
    "ROTA_DRAIN_GRACE": "1s",
    "ROTA_QUEUES": "default:20",
    "ROTA_HTTP_PORT": "0",
    "ROTA_LOG_FORMAT": "json",
    "ROTA_LOG_LEVEL": "info",
}
"""Settings that shorten minutes in production to seconds."""

START_TIMEOUT_S = 30.0
"""Seconds within which a process must be ready, even on a loaded machine."""


@dataclass(slots=True)
class DaemonProcess:
    """One daemon. All its output goes to a file, which remains after the daemon is killed."""

    popen: subprocess.Popen[bytes]
    log: Path
    _read: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)
    _unexpected_output: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.popen.pid

    @property
    def alive(self) -> bool:
        """Return whether the process runs or is stopped by SIGSTOP; a zombie does not count."""
        return self.popen.poll() is None

    def output_text(self) -> str:
        """Return all output."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str | None = None, /, **fields: Any) -> list[dict[str, Any]]:
        """Return the log events so far, optionally those with this name and these fields."""
        self._read_new_output()
        return [
            event
            for event in self._events
            if (name is None or event["event"] == name)
            and all(event.get(key) == value for key, value in fields.items())
        ]

    def unexpected_output(self) -> list[str]:
        """Return the output lines that are not log events: tracebacks, warnings, prints."""
        self._read_new_output()
        return list(self._unexpected_output)

    def wait_for(self, name: str, /, *, within: float = 15.0, **fields: Any) -> dict[str, Any]:
        """Return the first such event as soon as it is logged. Fail at once if the process ends without it."""

        def first_event() -> dict[str, Any] | None:
            ended = not self.alive  # read after this check, so that the last events count
            if found := self.events(name, **fields):
                return found[0]
            assert not ended, (
                f"the daemon has ended with {self.popen.returncode} before {name}:\n{self.output_text()[-4000:]}"
            )
            return None

        try:
            return until(first_event, within=within, what=f"{name} {fields or ''}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output_text()[-4000:]}") from None

    @property
    def url(self) -> str:
        """Return the base URL of the daemon's pages."""
        return str(self.wait_for("node.started", within=START_TIMEOUT_S)["http"])

    def get(self, page: str, *, method: str = "GET") -> tuple[int, str]:
        """Request a page of the daemon; return status and body."""
        request = urllib.request.Request(f"{self.url}/{page}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if the metric is missing."""
        lines = self.get("metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def rss(self) -> int:
        """Return the resident memory in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.alive:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.send(signal.SIGKILL)
        self.popen.wait(10)

    def wait_for_exit(self, *, within: float = 20.0) -> int:
        """Wait until the process has ended by itself; return its exit code."""
        try:
            return self.popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the daemon has not ended within {within:g} s:\n{self.output_text()[-4000:]}"
            ) from None

    def stop(self, *, within: float = 20.0) -> int:
        """Send SIGTERM, wait for the end and return the exit code."""
        self.send(signal.SIGTERM)
        return self.wait_for_exit(within=within)

    def clean_up(self) -> None:
        """Kill the process in any state, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait(10)

    def _read_new_output(self) -> None:
        with self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                self._unexpected_output.append(line)
            else:
                self._events.append(event)


class Daemons:
    """Starts daemons of one app on one database, and ends those that still run at the end of the block."""

    def __init__(self, folder: Path, dsn: str, *, app: str, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._dsn = dsn
        self._app = app
        self._environ = {**SHORT_SETTINGS, **(environ or {})}
        self._stack = ExitStack()
        self.started: list[DaemonProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(
        self,
        *,
        dsn: str | None = None,
        within: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        output: int | None = None,
        **environ: str,
    ) -> DaemonProcess:
        """Start a process without waiting.

        `within` is a command prefix such as `ip netns exec n`. If `output` is given, the process writes to this file
        descriptor and not to its log file.
        """
        log = self._folder / f"daemon-{len(self.started)}.log"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("ROTA_", "PG", "DATABASE_URL"))
        }
        environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(SOURCE)]),
            "DATABASE_URL": dsn or self._dsn,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            **self._environ,
            **environ,
        }
        with log.open("wb") as file:
            popen = subprocess.Popen(
                [*within, sys.executable, "-m", "rota", "run", "--app", self._app, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output or file,
                stderr=output or file,
                env=environment,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C in the terminal must reach the tests only, which then end the daemons
            )
        daemon = DaemonProcess(popen, log)
        self._stack.callback(daemon.clean_up)
        self.started.append(daemon)
        return daemon

    def start(self, *, dsn: str | None = None, within: tuple[str, ...] = (), **environ: str) -> DaemonProcess:
        """Start a daemon and wait until it is ready."""
        daemon = self.launch(dsn=dsn, within=within, arguments=(), output=None, **environ)
        daemon.wait_for("node.started", within=START_TIMEOUT_S)
        return daemon


@contextmanager
def frozen(daemon: DaemonProcess) -> Iterator[None]:
    """Stop the whole process with SIGSTOP during the block."""
    daemon.send(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.send(signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False
