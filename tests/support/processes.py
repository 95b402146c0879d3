"""Daemons as users run them: processes of their own, known by their pid, what they log and what they answer."""

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
"""Where this process has rota from: the daemons must have the same, also in a second work tree."""

QUICK = {
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
"""Settings under which what takes minutes in production takes seconds."""

UP_WITHIN = 30.0
"""Seconds in which a process must be up, on a machine that does other things, too."""


@dataclass(slots=True)
class DaemonProcess:
    """One daemon. Whatever it writes goes to a file, so that nothing is lost when it is killed."""

    popen: subprocess.Popen[bytes]
    log: Path
    _read: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)
    _noise: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Its process."""
        return self.popen.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped; a zombie doesn't."""
        return self.popen.poll() is None

    def said(self) -> str:
        """Everything it has written, as it wrote it."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str | None = None, /, **fields: Any) -> list[dict[str, Any]]:
        """What it has logged so far: all of it, or the events of that name with those fields."""
        self._read_on()
        return [
            event
            for event in self._events
            if (name is None or event["event"] == name)
            and all(event.get(key) == value for key, value in fields.items())
        ]

    def noise(self) -> list[str]:
        """What it has written that is no log line of rota's: tracebacks, warnings, prints."""
        self._read_on()
        return list(self._noise)

    def wait_for(self, name: str, /, *, within: float = 15.0, **fields: Any) -> dict[str, Any]:
        """Return the first such event once it has been logged; fail at once when the process has ended without it."""

        def seen() -> dict[str, Any] | None:
            ended = not self.alive  # before reading: its last words count
            if found := self.events(name, **fields):
                return found[0]
            assert not ended, f"the daemon has ended with {self.popen.returncode} before {name}:\n{self.said()[-4000:]}"
            return None

        try:
            return until(seen, within=within, what=f"{name} {fields or ''}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()[-4000:]}") from None

    @property
    def url(self) -> str:
        """Where it serves its pages."""
        return str(self.wait_for("node.started", within=UP_WITHIN)["http"])

    def get(self, page: str, *, method: str = "GET") -> tuple[int, str]:
        """Ask it for a page; return the status and the body."""
        request = urllib.request.Request(f"{self.url}/{page}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels; 0 where it has none yet."""
        lines = self.get("metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def rss(self) -> int:
        """Bytes of memory that it has resident."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; one that has ended already doesn't mind."""
        if self.alive:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """End it as the kernel would, and return once it is gone."""
        self.send(signal.SIGKILL)
        self.popen.wait(10)

    def ends(self, *, within: float = 20.0) -> int:
        """Return its exit code once it has ended by itself."""
        try:
            return self.popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon doesn't end within {within:g} s:\n{self.said()[-4000:]}") from None

    def stop(self, *, within: float = 20.0) -> int:
        """Tell it to drain, and return its exit code."""
        self.send(signal.SIGTERM)
        return self.ends(within=within)

    def end(self) -> None:
        """Leave nothing of it behind, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait(10)

    def _read_on(self) -> None:
        with self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                self._noise.append(line)
            else:
                self._events.append(event)


class Daemons:
    """Starts daemons of one app on one database; all that are left are ended with the block."""

    def __init__(self, folder: Path, dsn: str, *, app: str, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._dsn = dsn
        self._app = app
        self._environ = {**QUICK, **(environ or {})}
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
        """Start a process and return at once; `within` are the words of a command that runs it, such as `ip netns exec n`.

        Its output goes to the descriptor `output` instead of its file, if one is given.
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
                start_new_session=True,  # Ctrl-C at a terminal is for the tests; they end what they have started
            )
        daemon = DaemonProcess(popen, log)
        self._stack.callback(daemon.end)
        self.started.append(daemon)
        return daemon

    def start(self, *, dsn: str | None = None, within: tuple[str, ...] = (), **environ: str) -> DaemonProcess:
        """Start a daemon and return once it says that it is up."""
        daemon = self.launch(dsn=dsn, within=within, arguments=(), output=None, **environ)
        daemon.wait_for("node.started", within=UP_WITHIN)
        return daemon


@contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    """Hold the whole process still, as a long pause of the machine would."""
    daemon.send(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.send(signal.SIGCONT)
