"""When each service last succeeded, and what it is waiting for or failing at: the source of /healthz and /readyz."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import asyncpg

from rota.db.salvage import TRANSIENT
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Iterator


class ServiceMonitor:
    """The state of the services of one daemon. Times are seconds of this node's monotonic clock."""

    def __init__(self) -> None:
        self.last_success_at: dict[str, float] = {}
        """Service -> when it last succeeded, or when it started if it never has."""
        self.successes: defaultdict[str, int] = defaultdict(int)
        self.failures: defaultdict[str, int] = defaultdict(int)
        """Service -> failures and crashes since its last success."""
        self.unreachable: set[str] = set()
        """Services whose last failure was a transient database error."""
        self._failing: dict[str, tuple[float, str]] = {}
        """Service -> when its current series of failures began, and the cause of the last failure."""
        self._waiting_since: dict[str, float] = {}
        """Service -> since when it has been waiting for an answer from the database."""
        self._obstacles: dict[str, str] = {}
        """Service -> why its changes have no effect."""

    def record_start(self, service: str) -> None:
        """Measure the service's age from now on. Has no effect at a restart after a crash."""
        self.last_success_at.setdefault(service, boottime())

    def record_success(self, service: str) -> None:
        """Record a success. A service that rightly has nothing to do succeeds, too."""
        self.failures[service] = 0
        self.successes[service] += 1
        self.unreachable.discard(service)
        self._failing.pop(service, None)
        self.last_success_at[service] = boottime()

    def record_failure(self, service: str, error: BaseException) -> int:
        """Record a failure; return the number of failures since the last success."""
        self.failures[service] += 1
        if isinstance(error, TRANSIENT):
            self.unreachable.add(service)
        else:
            self.unreachable.discard(service)
        first_failure_at = self._failing.get(service, (boottime(), ""))[0]
        self._failing[service] = first_failure_at, _describe_cause(error)
        return self.failures[service]

    def record_obstacle(self, service: str, cause: str | None) -> None:
        """Record that the service succeeds without any effect; None: it has one."""
        if cause is None:
            self._obstacles.pop(service, None)
        else:
            self._obstacles[service] = cause

    def record_stop(self, service: str) -> None:
        """Remove a service that has stopped on purpose."""
        self.last_success_at.pop(service, None)
        self._failing.pop(service, None)
        self._obstacles.pop(service, None)

    @contextmanager
    def waiting_for_database(self, service: str) -> Iterator[None]:
        """Record that the service waits for the database while the block runs."""
        self._waiting_since[service] = boottime()
        try:
            yield
        finally:
            self._waiting_since.pop(service, None)

    def stalled_services(self, *, for_seconds: float) -> dict[str, str]:
        """Return service -> cause, for services without effect, and those failing or waiting for at least `for_seconds`."""
        now = boottime()
        waiting = {
            service: f"have waited {now - since:.0f} s for an answer of the database"
            for service, since in self._waiting_since.copy().items()
            if now - since >= for_seconds
        }
        failing = {
            service: f"have failed for {now - since:.0f} s ({cause})"
            for service, (since, cause) in self._failing.copy().items()
            if now - since >= for_seconds
        }
        return self._obstacles | waiting | failing


def _describe_cause(error: BaseException) -> str:
    """Return the error's type, and the server's message only if the error is transient: other messages may contain row values."""
    kind = type(error).__name__
    if isinstance(error, asyncpg.PostgresError) and isinstance(error, TRANSIENT) and error.args:
        return f"{kind}: {str(error.args[0])[:200]}"
    return kind
