"""Find and report the sessions that hold locks which rota's sessions wait for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from rota.db.blockers import find_blockers
from rota.db.salvage import LOST
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rota.db.blockers import Blocker
    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

LOOKUP_ERRORS: tuple[type[Exception], ...] = (*LOST, asyncpg.PostgresError)

CHECK_INTERVAL = timedelta(seconds=1)

REPORTED_WAIT = timedelta(seconds=2)
"""A wait is reported after two polls, or after this time if that is shorter."""


class LockWatch:
    """Service: asks for blockers while some other service of this node is stalled; otherwise it sends no statement.

    It has a connection of its own: under a lock, every connection of the pool may be waiting.
    """

    name = "lock watch"
    interval: timedelta | None = CHECK_INTERVAL

    def __init__(
        self,
        connect: Callable[[], Awaitable[asyncpg.Connection]],
        telemetry: Telemetry,
        monitor: ServiceMonitor,
        *,
        poll_interval: timedelta,
    ) -> None:
        self._connect = connect
        self._telemetry = telemetry
        self._monitor = monitor
        self._stalled_after = min(poll_interval, CHECK_INTERVAL).total_seconds()
        self._at_least = min(2 * poll_interval, REPORTED_WAIT)
        self._conn: asyncpg.Connection | None = None
        self._wait_began_at = 0.0
        """When the reported wait began, on this node's clock."""
        self.blockers: Sequence[Blocker] = ()
        """The last blockers found. Kept until no service is stalled: between two retries, nothing waits for a lock."""

    async def run_once(self) -> None:
        """Look for blockers if a service is stalled."""
        if not self._monitor.stalled_services(for_seconds=self._stalled_after):
            self.close()
            self.blockers = ()
            self._telemetry.lock_wait_sampled(0.0)
            return
        try:
            self._conn = self._conn or await self._connect()
            blockers = await find_blockers(self._conn, pid=None, at_least=self._at_least)
        except LOOKUP_ERRORS:
            self.close()  # the stalled service itself reports why the database can't be used
            return
        if blockers:
            if not self.blockers:
                self._wait_began_at = boottime() - blockers[0].waited
            known = {blocker.pid for blocker in self.blockers}
            for blocker in blockers:
                if blocker.pid not in known:
                    self._telemetry.blocked(str(blocker), do=blocker.cure)
            self.blockers = blockers
        if self.blockers:
            self._telemetry.lock_wait_sampled(boottime() - self._wait_began_at)

    def close(self) -> None:
        """Close the connection."""
        if self._conn is not None:
            self._conn.terminate()
            self._conn = None
