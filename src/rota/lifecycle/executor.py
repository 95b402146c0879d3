"""Run attempts: call the handler of a claimed job with its timeout, and pass the outcome on.

No exception of a handler leaves this file.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from rota.db import queries
from rota.db.pool import connection
from rota.db.salvage import TRANSIENT
from rota.domain.outcome import Interrupted, LeaseLost, Outcome, TimedOut
from rota.domain.payload import LIMITS
from rota.handlers.byte_budget import ByteBudget
from rota.handlers.failure import failure_of
from rota.lifecycle.call_outcome import apply_commit_and_backoff, outcome_of_call
from rota.observability.logs import set_job_context, set_shared_context
from rota.runtime.clock import boottime
from rota.supervision.loop import backoff_pause, uncancel
from rota.supervision.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rota.handlers import Handler
    from rota.handlers.attempt import Attempt
    from rota.handlers.local_port import Environment

MAX_PAYLOAD_BYTES = LIMITS["payload"]
"""Bytes reserved for a large payload until it has been read and its size is known."""


class Executor:
    """Runs attempts, and passes each outcome to `settle` as soon as it is known."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        environment: Environment,
        *,
        settle: Callable[[Attempt, Outcome], None],
        abandon: Callable[[Attempt], None],
        on_cancel_refused: Callable[[int], None] = lambda _: None,
        grace: float,
        max_bytes_in_flight: int = 1 << 24,
    ) -> None:
        self._handlers = handlers
        self._calls = {name: handler.bind() for name, handler in handlers.items()}
        self._environment = environment
        self._settle = settle
        self._abandon = abandon
        self._grace = grace
        self._budget = ByteBudget(max_bytes_in_flight)
        self._tasks = TaskSet(on_cancel_refused)
        self._context = lru_cache(maxsize=256)(_context)

    def start(self, attempt: Attempt) -> None:
        """Run the attempt in its own task and context. Its slot is freed when its outcome has been settled."""
        claim = attempt.claim
        context = self._context(claim.handler, claim.queue, claim.attempt).copy()
        self._tasks.start(self._execute(attempt), job_id=claim.job_id, context=context)

    async def finish(self) -> None:
        """Return once all attempts have ended. If the caller is cancelled, cancel them, too."""
        try:
            await self._tasks.wait()
        except asyncio.CancelledError:
            await self._tasks.end()
            raise

    async def end(self) -> None:
        """Cancel all attempts because the daemon has failed. Nothing is written: the jobs run again when their leases expire."""
        await self._tasks.end()

    async def _execute(self, attempt: Attempt) -> None:
        # Set here and not by start(): a task that is cancelled before its first step never runs, so it would settle nothing.
        attempt.task = asyncio.current_task()
        try:
            outcome = await (
                self._perform(attempt) if attempt.claim.payload is not None else self._perform_large(attempt)
            )
        except asyncio.CancelledError as error:
            if self._tasks.ending:
                self._abandon(attempt)
                raise
            outcome = failure_of(error, attempt)
        except BaseException as error:  # noqa: BLE001  an error of any kind fails this attempt only
            outcome = failure_of(error, attempt)
        attempt.ended_at = boottime()
        if attempt.abandoned:
            self._abandon(attempt)  # already settled by settle_abandoned(); this frees its slot
        else:
            self._settle(attempt, outcome)

    def settle_abandoned(self, attempt: Attempt) -> None:
        """Settle an attempt that has timed out but whose handler does not stop, before its lease ends."""
        assert isinstance(attempt.interruption, TimedOut)  # noqa: S101  checked by the caller
        attempt.abandoned = True
        outcome = replace(attempt.interruption, abandoned="task" if attempt.stop_flag is None else "thread")
        self._settle(attempt, apply_commit_and_backoff(attempt, self._handlers[attempt.claim.handler], outcome))

    async def _perform_large(self, attempt: Attempt) -> Outcome:
        """Load a payload that was too large for the claim, then call the handler. The payload is in memory only while it runs."""
        claim = attempt.claim
        release_timer = None
        if claim.timeout is not None:
            # The timeout counts from the claim, and the lease ends soon after it. So wait for memory at most half of the timeout,
            # then give the job back.
            release = partial(attempt.interrupt, Interrupted(began=False), grace=self._grace)
            release_timer = asyncio.get_running_loop().call_later(claim.timeout.total_seconds() / 2, release)
        try:
            async with self._budget.reserve(MAX_PAYLOAD_BYTES) as keep:
                text = await self._load(attempt)
                if release_timer is not None:
                    release_timer.cancel()
                if text is None:
                    return attempt.interruption or LeaseLost()
                keep(len(text))
                attempt.payload = text
                try:
                    return await self._perform(attempt)
                finally:
                    attempt.payload = ""
        except asyncio.CancelledError:
            if self._tasks.ending or attempt.handler_called or attempt.interruption is None:
                raise
            uncancel()
            return attempt.interruption
        finally:
            if release_timer is not None:
                release_timer.cancel()

    async def _load(self, attempt: Attempt) -> str | None:
        """Return the payload; None if the claim has been lost or interrupted. Retries while the database is unreachable."""
        failures = 0
        while attempt.interruption is None:
            try:
                async with connection(self._environment.pool) as db:
                    return await queries.load_payload(
                        db,
                        node=self._environment.node,
                        job_id=attempt.claim.job_id,
                        fence_token=attempt.claim.fence_token,
                    )
            except TRANSIENT:
                failures += 1
                await asyncio.sleep(backoff_pause(failures))
        return None

    async def _perform(self, attempt: Attempt) -> Outcome:
        """Call the handler; return the outcome, also if the handler raises."""
        if attempt.interruption is not None:
            return attempt.interruption
        claim = attempt.claim
        handler = self._handlers[claim.handler]
        set_job_context(claim.job_id, claim.schedule or claim.schedule_id)
        timer = self._start_timeout(attempt)
        try:
            result = await self._calls[claim.handler](attempt, self._environment)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._tasks.ending:
                raise
            return await outcome_of_call(attempt, handler, None, error)
        finally:
            if timer is not None:
                timer.cancel()
        return await outcome_of_call(attempt, handler, result, None)

    def _start_timeout(self, attempt: Attempt) -> asyncio.TimerHandle | None:
        claim = attempt.claim
        if claim.timeout is None:
            return None
        seconds = claim.timeout.total_seconds()
        if claim.payload is None:
            seconds -= boottime() - attempt.claim_sent_at  # the time spent on reading the payload
        interrupt = partial(attempt.interrupt, TimedOut(claim.timeout), grace=self._grace)
        return asyncio.get_running_loop().call_later(seconds, interrupt)


def _context(handler: str, queue: str, attempt: int) -> Context:
    """Return the context to copy for such attempts. Copying it is cheaper than setting its three variables each time."""
    context = copy_context()
    context.run(set_shared_context, handler, queue, attempt)
    return context
