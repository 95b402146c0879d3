"""Restart the loops of a daemon after a crash, with new state. Each crash is counted and logged with its traceback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.errors import DatabaseUnusable
from rota.supervision.loop import MAX_BACKOFF_SECONDS, backoff_pause, uncancel
from rota.supervision.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

CRASHES_IN_A_ROW = 10
"""After this many crashes of one loop without a success, the daemon drains and exits: about a minute, with the backoff."""


class Supervisor:
    """Owns the tasks of the loops. Jobs keep running while a loop is restarted."""

    def __init__(
        self,
        telemetry: Telemetry,
        monitor: ServiceMonitor,
        *,
        give_up: Callable[[str, BaseException], None],
        on_cancel_refused: Callable[[int], None],
    ) -> None:
        self._telemetry = telemetry
        self._monitor = monitor
        self._give_up = give_up
        self._tasks = TaskSet(on_cancel_refused)

    def start(
        self,
        name: str,
        run: Callable[[], Coroutine[Any, Any, Any]],
        *,
        critical: bool = True,
        max_backoff_seconds: float = MAX_BACKOFF_SECONDS,
    ) -> None:
        """Run the loop until it returns. Call `run` again after each crash: it must rebuild the state that a crash may have broken.

        Calls `give_up` when a critical loop has crashed CRASHES_IN_A_ROW times without a success, and when any loop raises
        DatabaseUnusable. `max_backoff_seconds`: longest pause between a crash and the restart.
        """
        self._telemetry.loop_supervised(name)
        self._tasks.start(
            self._restart_after_crashes(name, run, critical=critical, max_backoff_seconds=max_backoff_seconds),
            name=name,
        )

    async def end(self) -> None:
        """Cancel all loops; return once they have ended."""
        await self._tasks.end()

    async def _restart_after_crashes(
        self, name: str, run: Callable[[], Coroutine[Any, Any, Any]], *, critical: bool, max_backoff_seconds: float
    ) -> None:
        crashes, successes, ended = 0, -1, False
        while not ended:
            try:
                if crashes:
                    await asyncio.sleep(min(backoff_pause(crashes), max_backoff_seconds))
                await run()
                ended = True
            except (Exception, asyncio.CancelledError) as error:
                if self._tasks.ending:
                    raise
                uncancel()
                crashes = crashes + 1 if self._monitor.successes[name] == successes else 1
                successes = self._monitor.successes[name]
                self._monitor.record_failure(name, error)
                self._telemetry.loop_crashed(name, error, crashes=crashes)
                if (critical and crashes == CRASHES_IN_A_ROW) or isinstance(error, DatabaseUnusable):
                    self._give_up(name, error)
