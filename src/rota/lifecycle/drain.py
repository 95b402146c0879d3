"""Step 8 of a job's life, where its daemon has to go: what runs may end, what doesn't is interrupted, what won't is left behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rota.db import queries
from rota.db.pool import Pool, connection
from rota.db.salvage import TRANSIENT
from rota.domain.outcome import Interrupted
from rota.lifecycle.settle import settle_same_outcome
from rota.runtime.shutdown import QUIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import timedelta

    from rota.domain.job import NodeId
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.running import Running
    from rota.observability.telemetry import Telemetry


class Drain:
    """The end of a node, as far as its jobs are concerned. Leases are extended meanwhile, by the heartbeat."""

    def __init__(
        self,
        pool: Pool,
        running: Running,
        telemetry: Telemetry,
        *,
        node: NodeId,
        timeout: timedelta,
        grace: timedelta,
        random: Callable[[], float],
        alert: str | None,
    ) -> None:
        self._pool = pool
        self._running = running
        self._telemetry = telemetry
        self._node = node
        self._timeout = timeout.total_seconds()
        self._grace = grace.total_seconds()
        self._random = random
        self._alert = alert

    async def run(self, hurry: asyncio.Event, quitting: asyncio.Event) -> bool:
        """Let jobs finish; at the deadline, or at `hurry`, interrupt them. Return whether all handlers have ended.

        `quitting`: interrupted handlers get QUIT_SECONDS instead of the grace.
        """
        self._telemetry.node_stopping(running=len(self._running), how="drain")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await _first_of(self._running.wait_until_empty(), hurry.wait())
        if not len(self._running):
            return True
        self._telemetry.node_stopping(running=len(self._running), how="interrupt")
        self._running.interrupt_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await _first_of(self._running.wait_until_empty(), _quit(quitting))
        left = [attempt for attempt in self._running.snapshot() if not attempt.ended_at]
        if left:
            await self._leave_behind(left)
        return not left

    async def _leave_behind(self, left: list[Attempt]) -> None:
        """Release what still runs, from the end of its lease on. To be written last: the process must end now."""
        for attempt in left:
            if not attempt.stuck:
                attempt.stuck = True
                self._telemetry.handler_stuck(job_id=attempt.claim.job_id, handler=attempt.claim.handler, why="drain")
        stuck = [(attempt.claim.job_id, attempt.claim.fence_token) for attempt in left]
        with suppress(*TRANSIENT):
            async with connection(self._pool) as db:
                await settle_same_outcome(
                    db,
                    await queries.load_terms(db, node=self._node, attempts=stuck),
                    Interrupted(began=True, still_running=True),
                    self._telemetry,
                    random=self._random,
                    expired_only=False,
                    alert=self._alert,
                )
                await queries.remove_node(db, node=self._node)


async def _quit(quitting: asyncio.Event) -> None:
    await quitting.wait()
    await asyncio.sleep(QUIT_SECONDS)


async def _first_of(*events: Coroutine[Any, Any, Any]) -> None:
    """Wait until the first of them is done, and end the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(event) for event in events]
        done = asyncio.Event()
        for task in tasks:
            task.add_done_callback(lambda _: done.set())
        await done.wait()
        for task in tasks:
            task.cancel()
