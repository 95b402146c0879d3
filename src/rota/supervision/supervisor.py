"""Keep the loops of a daemon running: log a crash with its traceback, count it, and start the loop again with new state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.errors import DatabaseUnusable
from rota.supervision.loop import LONGEST_PAUSE, backoff_pause, uncancel
from rota.supervision.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rota.observability.telemetry import Telemetry
    from rota.supervision.loop import Pulse

CRASHES_IN_A_ROW = 10
"""Crashes of one loop without a success in between after which the daemon drains and ends: about a minute with the backoff."""


class Supervisor:
    """Owns the tasks of the loops. Jobs go on while a loop is restarted."""

    def __init__(
        self,
        telemetry: Telemetry,
        pulse: Pulse,
        *,
        give_up: Callable[[str, BaseException], None],
        refused: Callable[[int], None],
    ) -> None:
        self._telemetry = telemetry
        self._pulse = pulse
        self._give_up = give_up
        self._tasks = Tasks(refused)

    def start(
        self,
        name: str,
        run: Callable[[], Coroutine[Any, Any, Any]],
        *,
        critical: bool = True,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        """Run the loop until it returns. `run` is called again after each crash, and builds what a crash may have broken.

        A critical loop that crashes CRASHES_IN_A_ROW times without a success makes the daemon give up, and so does a database
        that can't be used any more. `longest_pause`: at most
        so many seconds pass between a crash and the restart.
        """
        self._telemetry.loop_supervised(name)
        self._tasks.start(self._keep(name, run, critical=critical, longest_pause=longest_pause), name=name)

    async def end(self) -> None:
        """Cancel all loops, and return once they have ended."""
        await self._tasks.end()

    async def _keep(
        self, name: str, run: Callable[[], Coroutine[Any, Any, Any]], *, critical: bool, longest_pause: float
    ) -> None:
        crashes, successes, ended = 0, -1, False
        while not ended:
            try:
                if crashes:
                    await asyncio.sleep(min(backoff_pause(crashes), longest_pause))
                await run()
                ended = True
            except (Exception, asyncio.CancelledError) as error:
                if self._tasks.ending:
                    raise
                uncancel()
                crashes = crashes + 1 if self._pulse.successes[name] == successes else 1
                successes = self._pulse.successes[name]
                self._pulse.failed(name, error)
                self._telemetry.loop_crashed(name, error, crashes=crashes)
                if (critical and crashes == CRASHES_IN_A_ROW) or isinstance(error, DatabaseUnusable):
                    self._give_up(name, error)
