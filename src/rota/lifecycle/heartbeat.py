"""Step 4 of a job's life: extend the leases of what runs here, and tell of those that were lost.

The heartbeat turns on a thread of its own, with its own loop and connection, so that a handler which blocks the main loop loses
neither its own lease nor its neighbours'. `Trust` turns on the main loop and ends what can't be trusted to be ours any more.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING

import asyncpg

from rota.db import pool, queries
from rota.db.connecting import close_connection
from rota.db.pool import PATIENCE, ConnectionLost, cut
from rota.db.salvage import TRANSIENT, salvage
from rota.domain.job import FenceToken
from rota.domain.outcome import Cancelled, LeaseLost, TimedOut
from rota.handlers.attempt import margin
from rota.runtime.clock import boottime
from rota.supervision import stacks

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from rota.domain.job import NodeId
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.running import Running
    from rota.observability.telemetry import Telemetry

TICK = timedelta(milliseconds=250)

LOOKS = 2.0
"""Seconds for which a request to cancel is looked for: it may overtake the answer to the claim, or find its row locked."""

SETTLE_SECONDS = 1.0
"""How long beyond timeout and grace a lease holds: in that time an attempt whose handler does not stop is settled as timed out."""

STALL_SECONDS = 1.0
"""From so long a stall on, the handlers that ran meanwhile are named."""

LAG_SHOWN = 30.0
"""Seconds for which a lag of the main loop is shown: a scrape that comes only now and then must see it."""


class Heartbeat:
    """Service, on its own thread: one statement for all that runs here, when the first of it needs it."""

    name = "heartbeat"
    interval: timedelta | None = TICK
    max_backoff_seconds = 1.0
    """Seconds: leases don't wait for a long backoff to end."""

    def __init__(
        self,
        running: Running,
        telemetry: Telemetry,
        *,
        node: NodeId,
        connect: Callable[[], Awaitable[asyncpg.Connection]],
        main: asyncio.AbstractEventLoop,
        beat: float | None,
        grace: float,
        wedged_after: float,
    ) -> None:
        self._running = running
        self._telemetry = telemetry
        self._node = node
        self._connect = connect
        self._main = main
        self._beat = beat
        self._grace = grace
        self._wedged_after = wedged_after
        self._conn: asyncpg.Connection | None = None
        self._is_expired = False
        self._used_at = -inf
        self._told_at = -inf
        self._main_thread = threading.get_ident()
        self._ticked = boottime()
        self.frozen_at = -inf
        """When this thread was last held up for STALL_SECONDS and more: some code kept the interpreter for itself."""
        self.blocked_at: list[str] = []
        """Where the main thread was when it was last seen not to turn."""
        self.main_turned = boottime()

    def look_now(self) -> None:
        """Extend what has not been extended since, because somebody may have asked to cancel it."""
        self._told_at = boottime()

    async def run_once(self) -> None:
        """Extend what is due for it; does nothing, and asks nothing, when nothing is."""
        now = boottime()
        if now - self._ticked > STALL_SECONDS:
            self.frozen_at = now
        self._ticked = now
        if now - self.main_turned > STALL_SECONDS:
            self.blocked_at = stacks.frame_stack(sys._current_frames().get(self._main_thread))  # noqa: SLF001
        if now - self.main_turned > self._wedged_after:
            return
        held = [
            a
            for a in self._running.snapshot()
            # Those that wait for their settlement, too: what is done must not be begun again because that takes long.
            if not a.committed and not self._past_its_stop(a, now)
        ]
        if not held and self._conn is not None and now > self._used_at + pool.IDLE_SECONDS:
            await close_connection(self._conn)
            self._conn = None
        told_at = self._told_at if now <= self._told_at + LOOKS else -inf
        if not any(now >= self._due(a, 1.0) or self._renewed_at(a) <= told_at for a in held):
            return
        # All that will be due soon goes along, so that beats fall together.
        chosen = [a for a in held if now >= self._due(a, 0.5) or self._renewed_at(a) <= told_at]
        shortest = min(a.lease for a in chosen)
        found = await self._extend(chosen, patience=max(0.5, shortest / 3))
        self._main.call_soon_threadsafe(self._renewed, chosen, found, now)

    def reconnect(self) -> None:
        """Use a new connection from the next beat on: the database has moved. From any thread."""
        self._is_expired = True

    async def close(self) -> None:
        """Give the connection back when the thread ends."""
        if self._conn is not None:
            self._conn.terminate()

    def _due(self, attempt: Attempt, share: float) -> float:
        beat = self._beat or attempt.lease / 3
        return self._renewed_at(attempt) + min(beat, attempt.lease / 3) * share

    def _renewed_at(self, attempt: Attempt) -> float:
        """When the statement was sent that last extended it; at first, the one that claimed it."""
        return attempt.trusted_until - attempt.lease + margin(attempt.lease)

    def _past_its_stop(self, attempt: Attempt, now: float) -> bool:
        return attempt.stop_by is not None and now > attempt.stop_by

    async def _extend(self, chosen: list[Attempt], patience: float) -> dict[FenceToken, tuple[bool, bool]]:
        if self._is_expired:
            self._is_expired = False
            await self.close()
        self._used_at = boottime()
        conn = self._conn
        try:
            if conn is None or conn.is_closed():
                conn = self._conn = await self._connect()
                # The driver looks up its types at the first use, in several round trips: not within the patience of a beat.
                await queries.extend_leases(
                    conn, node=self._node, held=[(0, FenceToken(0))], grace=timedelta(0), patience=PATIENCE
                )
            held = [(a.claim.job_id, a.claim.fence_token) for a in chosen]
            return await self._extend_on(conn, held, patience)
        except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            if conn is not None and cut(conn):
                self._conn = None
                raise ConnectionLost(str(error)) from error
            raise
        except TRANSIENT:
            if self._conn is not None:
                self._conn.terminate()
                self._conn = None
            raise

    async def _extend_on(
        self, conn: asyncpg.Connection, held: list[tuple[int, FenceToken]], patience: float
    ) -> dict[FenceToken, tuple[bool, bool]]:
        """Extend all leases in one statement. A row that the server refuses is not extended: its lease ends."""

        async def extend(batch: Sequence[tuple[int, FenceToken]]) -> dict[FenceToken, tuple[bool, bool]]:
            return await queries.extend_leases(
                conn,
                node=self._node,
                held=batch,
                grace=timedelta(seconds=self._grace + SETTLE_SECONDS),
                patience=patience,
            )

        async def refuse(row: tuple[int, FenceToken], error: Exception) -> dict[FenceToken, tuple[bool, bool]]:
            job_id, token = row
            self._telemetry.row_refused("heartbeat", error, job_id=job_id)
            return {token: (False, False)}

        return {token: answer for found in await salvage(held, extend, refuse) for token, answer in found.items()}

    def _renewed(self, chosen: list[Attempt], found: dict[FenceToken, tuple[bool, bool]], asked: float) -> None:
        """On the main loop: move what we may trust, interrupt what was lost or is to be cancelled."""
        extended = 0
        for attempt in chosen:
            claim = attempt.claim
            if (answer := found.get(claim.fence_token)) is None:
                # Its settlement may have come in between, so this alone is no news. That it was lost is told when it ends.
                self._telemetry.lease_missed(job_id=claim.job_id)
                if attempt.completing:
                    attempt.committed = True  # by the transaction in which job.complete() was called
                attempt.interrupt(LeaseLost(), grace=self._grace)
                continue
            was_extended, cancel_requested = answer
            if was_extended:
                extended += 1
                attempt.trusted_until = asked + attempt.lease - margin(attempt.lease)
            if cancel_requested:
                attempt.interrupt(Cancelled("cancelled on request"), grace=self._grace)
        self._telemetry.leases_extended(held=len(chosen), extended=extended)


class Trust:
    """Service, on the main loop: interrupt what another node might have been given by now, and tell of handlers that don't stop."""

    name = "trust"
    interval: timedelta | None = TICK

    def __init__(
        self,
        running: Running,
        telemetry: Telemetry,
        heartbeat: Heartbeat,
        *,
        settle_abandoned: Callable[[Attempt], None],
        grace: float,
    ) -> None:
        self._running = running
        self._telemetry = telemetry
        self._heartbeat = heartbeat
        self._settle_abandoned = settle_abandoned
        self._grace = grace
        self._turned = self._worst_at = boottime()
        self._worst = 0.0

    async def run_once(self) -> None:
        """Look at every attempt that runs here, by this node's own clock."""
        now = boottime()
        lag = max(0.0, now - self._turned - TICK.total_seconds() * 1.1)
        if lag >= self._worst or now > self._worst_at + LAG_SHOWN:
            self._worst, self._worst_at = lag, now
        self._telemetry.loop_lagged(
            lag,
            worst=self._worst,
            suspects=self._ran_since(now - lag) if lag >= STALL_SECONDS else [],
            where=self._heartbeat.blocked_at,
            frozen=self._heartbeat.frozen_at > now - lag,
        )
        self._turned = self._heartbeat.main_turned = now
        for attempt in self._running.snapshot():
            if attempt.ended_at:
                continue
            claim = attempt.claim
            if now > attempt.trusted_until and attempt.interruption is None and not attempt.committing:
                attempt.interrupt(LeaseLost(), grace=self._grace)
            if attempt.stop_by is not None and now > attempt.stop_by and not attempt.stuck:
                attempt.stuck = True
                self._telemetry.handler_stuck(job_id=claim.job_id, handler=claim.handler, why=attempt.stop_reason or "")
            if (
                attempt.stuck
                and isinstance(attempt.interruption, TimedOut)
                and not attempt.abandoned
                and now > attempt.lease_ends_at(self._grace + SETTLE_SECONDS) - SETTLE_SECONDS
            ):
                self._settle_abandoned(attempt)

    def _ran_since(self, moment: float) -> list[tuple[str, int]]:
        """Return handler and job_id of the attempts that have run since then."""
        return [
            (attempt.claim.handler, attempt.claim.job_id)
            for attempt in self._running.snapshot()
            if attempt.began and (not attempt.ended_at or attempt.ended_at > moment)
        ]
