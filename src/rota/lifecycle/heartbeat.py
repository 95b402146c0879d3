"""Extend the leases of the attempts that run on this node, and interrupt attempts whose lease may have ended.

`Heartbeat` has its own thread, event loop and connection: a handler that blocks the main loop must not cost any job its lease.
`LeaseWatch` runs on the main loop.
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
from rota.db.pool import ConnectionLost, is_connection_lost
from rota.db.salvage import TRANSIENT, ChangeIgnored, salvage
from rota.db.sessions import STATEMENT_SECONDS
from rota.domain.job import FenceToken
from rota.domain.outcome import Cancelled, LeaseLost, TimedOut
from rota.handlers.attempt import safety_margin
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

CANCEL_CHECK_SECONDS = 2.0
"""How long after a cancel notification to keep checking for the request.

It may arrive before the claim's own answer, or its row may be locked at first.
"""

SETTLE_SECONDS = 1.0
"""A lease lasts this long beyond timeout and grace, so that an attempt whose handler does not stop can be settled as timed out."""

STALL_SECONDS = 1.0
"""A stall of the main loop of at least this length is logged with the handlers that ran meanwhile."""

LAG_SHOWN_SECONDS = 30.0
"""How long the worst recent lag of the main loop stays in the gauge, so that a scrape sees it."""


class Heartbeat:
    """Service on its own thread. Extends the leases of this node's attempts in one statement, as soon as the first one is due."""

    name = "heartbeat"
    interval: timedelta | None = TICK
    max_backoff_seconds = 1.0
    """Short, because leases end while the heartbeat pauses."""

    def __init__(
        self,
        running: Running,
        telemetry: Telemetry,
        *,
        node: NodeId,
        connect: Callable[[], Awaitable[asyncpg.Connection]],
        main_loop: asyncio.AbstractEventLoop,
        interval_seconds: float | None,
        grace: float,
        wedged_after: float,
    ) -> None:
        self._running = running
        self._telemetry = telemetry
        self._node = node
        self._connect = connect
        self._main_loop = main_loop
        self._interval_seconds = interval_seconds
        self._grace = grace
        self._wedged_after = wedged_after
        self._conn: asyncpg.Connection | None = None
        self._must_reconnect = False
        self._used_at = -inf
        self._cancel_notified_at = -inf
        self._main_thread = threading.get_ident()
        self._last_tick_at = boottime()
        self._frozen_at = -inf
        """When this thread was last found delayed by STALL_SECONDS or more: some code held the interpreter's lock."""
        self.blocked_at: list[str] = []
        """The stack of the main thread when its loop was last found blocked."""
        self.main_loop_ran_at = boottime()

    def was_frozen_since(self, moment: float) -> bool:
        """Return whether this thread was delayed after this moment. Includes a delay that still lasts."""
        return self._frozen_at > moment or boottime() - self._last_tick_at > STALL_SECONDS

    def check_cancel_requests(self) -> None:
        """On the next ticks, extend every lease not yet extended after this call: the answer includes requests to cancel."""
        self._cancel_notified_at = boottime()

    async def run_once(self) -> None:
        """Extend the leases that are due. Sends nothing if none is."""
        now = boottime()
        if now - self._last_tick_at > STALL_SECONDS:
            self._frozen_at = now
        self._last_tick_at = now
        if now - self.main_loop_ran_at > STALL_SECONDS:
            self.blocked_at = stacks.frame_stack(sys._current_frames().get(self._main_thread))  # noqa: SLF001
        if now - self.main_loop_ran_at > self._wedged_after:
            return
        attempts = [
            attempt
            for attempt in self._running.snapshot()
            # Include attempts that await settlement: a slow settle must not let finished work run again.
            if not attempt.committed and not self._is_past_stop(attempt, now)
        ]
        if not attempts and self._conn is not None and now > self._used_at + pool.IDLE_SECONDS:
            await close_connection(self._conn)
            self._conn = None
        notified_at = self._cancel_notified_at if now <= self._cancel_notified_at + CANCEL_CHECK_SECONDS else -inf
        if not any(
            now >= self._due_at(attempt, 1.0) or self._extended_at(attempt) <= notified_at for attempt in attempts
        ):
            return
        # Extend those that are due soon as well, so that later extensions share a statement.
        chosen = [
            attempt
            for attempt in attempts
            if now >= self._due_at(attempt, 0.5) or self._extended_at(attempt) <= notified_at
        ]
        shortest = min(attempt.lease for attempt in chosen)
        answers = await self._extend(chosen, patience=max(0.5, shortest / 3))
        self._main_loop.call_soon_threadsafe(self._on_extended, chosen, answers, now)

    def reconnect(self) -> None:
        """Use a new connection from the next extension on. Callable from any thread."""
        self._must_reconnect = True

    async def close(self) -> None:
        """Close the connection."""
        if self._conn is not None:
            self._conn.terminate()

    def _due_at(self, attempt: Attempt, share: float) -> float:
        interval = self._interval_seconds or attempt.lease / 3
        return self._extended_at(attempt) + min(interval, attempt.lease / 3) * share

    def _extended_at(self, attempt: Attempt) -> float:
        """Return when the statement that last extended the lease was sent; before the first extension, the claim."""
        return attempt.trusted_until - attempt.lease + safety_margin(attempt.lease)

    def _is_past_stop(self, attempt: Attempt, now: float) -> bool:
        return attempt.stop_by is not None and now > attempt.stop_by

    async def _extend(self, chosen: list[Attempt], patience: float) -> dict[FenceToken, tuple[bool | None, bool]]:
        if self._must_reconnect:
            self._must_reconnect = False
            await self.close()
        self._used_at = boottime()
        conn = self._conn
        try:
            if conn is None or conn.is_closed():
                conn = self._conn = await self._connect()
                # The first statement takes several round trips, because the driver looks up types. Allow a longer timeout for it.
                await queries.extend_leases(
                    conn, node=self._node, claims=[(0, FenceToken(0))], grace=timedelta(0), patience=STATEMENT_SECONDS
                )
            claims = [(attempt.claim.job_id, attempt.claim.fence_token) for attempt in chosen]
            return await self._extend_on(conn, claims, patience)
        except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            if conn is not None and is_connection_lost(conn):
                self._conn = None
                raise ConnectionLost(str(error)) from error
            raise
        except TRANSIENT:
            if self._conn is not None:
                self._conn.terminate()
                self._conn = None
            raise

    async def _extend_on(
        self, conn: asyncpg.Connection, claims: list[tuple[int, FenceToken]], patience: float
    ) -> dict[FenceToken, tuple[bool | None, bool]]:
        """Extend the leases in one statement. A row that the server refuses is skipped, so its lease ends."""

        async def extend(batch: Sequence[tuple[int, FenceToken]]) -> dict[FenceToken, tuple[bool | None, bool]]:
            return await queries.extend_leases(
                conn,
                node=self._node,
                claims=batch,
                grace=timedelta(seconds=self._grace + SETTLE_SECONDS),
                patience=patience,
            )

        async def refuse(row: tuple[int, FenceToken], error: Exception) -> dict[FenceToken, tuple[bool | None, bool]]:
            job_id, token = row
            self._telemetry.row_refused("heartbeat", error, job_id=job_id)
            return {token: (False, False)}

        return {token: answer for answers in await salvage(claims, extend, refuse) for token, answer in answers.items()}

    def _on_extended(
        self, chosen: list[Attempt], answers: dict[FenceToken, tuple[bool | None, bool]], sent_at: float
    ) -> None:
        """Process the answers on the main loop: interrupt attempts that lost their lease or have a request to cancel."""
        extended = 0
        for attempt in chosen:
            claim = attempt.claim
            if (answer := answers.get(claim.fence_token)) is None:
                # This alone does not prove that the lease was lost: the job may have been settled meanwhile. A lost lease is
                # reported when the attempt ends.
                self._telemetry.lease_missed(job_id=claim.job_id)
                if attempt.completing:
                    attempt.committed = True  # by the transaction in which job.complete() was called
                attempt.interrupt(LeaseLost(), grace=self._grace)
                continue
            was_extended, cancel_requested = answer
            if was_extended is None:
                self._telemetry.row_refused("heartbeat", ChangeIgnored(), job_id=claim.job_id, handler=claim.handler)
            if was_extended:
                extended += 1
                attempt.trusted_until = sent_at + attempt.lease - safety_margin(attempt.lease)
            if cancel_requested:
                attempt.interrupt(Cancelled("cancelled on request"), grace=self._grace)
        self._telemetry.leases_extended(held=len(chosen), extended=extended)


class LeaseWatch:
    """Service on the main loop: interrupts attempts whose lease may have ended, and reports handlers that do not stop."""

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
        self._ran_at = self._worst_lag_at = boottime()
        self._worst_lag = 0.0

    async def run_once(self) -> None:
        """Check every attempt that runs here, by this node's own clock, and measure the lag of the main loop."""
        now = boottime()
        lag = max(0.0, now - self._ran_at - TICK.total_seconds() * 1.1)
        if lag >= self._worst_lag or now > self._worst_lag_at + LAG_SHOWN_SECONDS:
            self._worst_lag, self._worst_lag_at = lag, now
        self._telemetry.loop_lagged(
            lag,
            worst=self._worst_lag,
            suspects=self._ran_since(now - lag) if lag >= STALL_SECONDS else [],
            where=self._heartbeat.blocked_at,
            frozen=self._heartbeat.was_frozen_since(now - lag),
        )
        self._ran_at = self._heartbeat.main_loop_ran_at = now
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
        """Return handler and job_id of the attempts that were running at or after this moment."""
        return [
            (attempt.claim.handler, attempt.claim.job_id)
            for attempt in self._running.snapshot()
            if attempt.handler_called and (not attempt.ended_at or attempt.ended_at > moment)
        ]
