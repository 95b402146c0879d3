"""Stop a node's jobs: wait for them, interrupt those that are left, and release those whose handler does not stop."""

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
    """Stops the jobs of a node. The heartbeat keeps extending their leases meanwhile."""

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

    async def run(self, interrupt_requested: asyncio.Event, quit_requested: asyncio.Event) -> bool:
        """Wait for the jobs; interrupt them at the timeout or on `interrupt_requested`. Return whether all handlers have ended.

        When `quit_requested` is set, interrupted handlers get QUIT_SECONDS instead of the grace.
        """
        self._telemetry.node_stopping(running=len(self._running), how="drain")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await _wait_for_first(self._running.wait_until_empty(), interrupt_requested.wait())
        if not len(self._running):
            return True
        self._telemetry.node_stopping(running=len(self._running), how="interrupt")
        self._running.interrupt_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await _wait_for_first(self._running.wait_until_empty(), _wait_for_quit(quit_requested))
        unstopped = [attempt for attempt in self._running.snapshot() if not attempt.ended_at]
        if unstopped:
            await self._release_unstopped(unstopped)
        return not unstopped

    async def _release_unstopped(self, unstopped: list[Attempt]) -> None:
        """Release the jobs whose handlers still run: they run again when their leases end. The process must exit after this."""
        for attempt in unstopped:
            if not attempt.stuck:
                attempt.stuck = True
                self._telemetry.handler_stuck(job_id=attempt.claim.job_id, handler=attempt.claim.handler, why="drain")
        # A limited job keeps its owner, and so its permit, until the reaper takes it: its handler may still run for a moment.
        attempts = [
            (attempt.claim.job_id, attempt.claim.fence_token) for attempt in unstopped if not attempt.claim.is_limited
        ]
        with suppress(*TRANSIENT):
            async with connection(self._pool) as db:
                if attempts:
                    await settle_same_outcome(
                        db,
                        await queries.load_terms(db, node=self._node, attempts=attempts),
                        Interrupted(began=True, still_running=True),
                        self._telemetry,
                        random=self._random,
                        expired_only=False,
                        alert=self._alert,
                    )
                await queries.remove_node(db, node=self._node)


async def _wait_for_quit(quit_requested: asyncio.Event) -> None:
    await quit_requested.wait()
    await asyncio.sleep(QUIT_SECONDS)


async def _wait_for_first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Return when the first coroutine is done, and cancel the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        done = asyncio.Event()
        for task in tasks:
            task.add_done_callback(lambda _: done.set())
        await done.wait()
        for task in tasks:
            task.cancel()
