"""Step 3 of a job's life: claim -> outcome. Nothing that a handler does leaves this file as an exception."""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from rota.db import queries
from rota.db.pool import connection
from rota.db.salvage import TRANSIENT
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
    Interrupted,
    LeaseLost,
    Outcome,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
)
from rota.domain.payload import LIMITS, encode_result, plain
from rota.errors import InvalidPayload
from rota.handler_exceptions import Cancel, Retry, Snooze
from rota.handlers.byte_budget import OFF_LOOP_BYTES, ByteBudget, off_the_loop
from rota.handlers.failure import ERROR_LIMIT, describe, readable, why_again
from rota.handlers.python import ChildFailed
from rota.observability.logs import carry, carry_alike
from rota.runtime.clock import boottime
from rota.supervision.loop import backoff_pause, uncancel
from rota.supervision.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rota.handlers import Handler
    from rota.handlers.attempt import Attempt
    from rota.handlers.job import Environment

SUCCEEDED = Succeeded()
"""The outcome of most attempts."""

MAX_PAYLOAD_BYTES = LIMITS["payload"]
"""The bytes reserved for a large payload until it has been read and its size is known."""

CANCELLED_ITSELF = Failed(
    kind="CancelledError", text="the handler cancelled its own task: to end a job, raise rota.Cancel or return"
)


class Executor:
    """Runs attempts, and hands each outcome to `settle` the moment it is known."""

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
        """Take one claim to its outcome, in a task and a context of its own. Its slot is freed when the outcome is settled."""
        claim = attempt.claim
        context = self._context(claim.handler, claim.queue, claim.attempt).copy()
        self._tasks.start(self._execute(attempt), job_id=claim.job_id, context=context)

    async def finish(self) -> None:
        """Return once all attempts have ended; cut them when the caller is cancelled meanwhile."""
        try:
            await self._tasks.wait()
        except asyncio.CancelledError:
            await self._tasks.end()
            raise

    async def end(self) -> None:
        """Cut all attempts because the daemon is falling: nothing is written, and their leases settle them."""
        await self._tasks.end()

    async def _execute(self, attempt: Attempt) -> None:
        # Not before: a task that is cancelled before it began never runs, and would settle nothing.
        attempt.task = asyncio.current_task()
        try:
            outcome = await (
                self._perform(attempt) if attempt.claim.payload is not None else self._perform_large(attempt)
            )
        except asyncio.CancelledError as error:
            if self._tasks.ending:
                self._abandon(attempt)
                raise
            outcome = describe(error, attempt)
        except KeyboardInterrupt:
            raise  # the third Ctrl-C, which ends the process wherever it is
        except BaseException as error:  # noqa: BLE001  whatever it is, it costs this attempt and nothing else
            outcome = describe(error, attempt)
        attempt.ended_at = boottime()
        if attempt.abandoned:
            self._abandon(attempt)  # settled meanwhile: it only gives its slot back
        else:
            self._settle(attempt, outcome)

    def give_up(self, attempt: Attempt) -> None:
        """Settle an attempt that timed out and whose handler does not stop: its lease is about to end."""
        assert isinstance(attempt.interruption, TimedOut)  # noqa: S101  the caller has looked
        attempt.abandoned = True
        outcome = replace(attempt.interruption, abandoned="task" if attempt.stop_flag is None else "thread")
        self._settle(attempt, _instead(attempt, self._handlers[attempt.claim.handler], outcome))

    async def _perform_large(self, attempt: Attempt) -> Outcome:
        """Do the same with a payload that was too large to come with the claim: it is held while the handler runs."""
        claim = attempt.claim
        waiter = None
        if claim.timeout is not None:
            # The lease ends soon after the timeout, which counts from the claim: wait no longer than half of it.
            give_back = partial(attempt.interrupt, Interrupted(began=False), grace=self._grace)
            waiter = asyncio.get_running_loop().call_later(claim.timeout.total_seconds() / 2, give_back)
        try:
            async with self._budget.hold(MAX_PAYLOAD_BYTES) as keep:
                text = await self._load(attempt)
                if waiter is not None:
                    waiter.cancel()
                if text is None:
                    return attempt.interruption or LeaseLost()
                keep(len(text))
                attempt.payload = text
                try:
                    return await self._perform(attempt)
                finally:
                    attempt.payload = ""
        except asyncio.CancelledError:
            if self._tasks.ending or attempt.began or attempt.interruption is None:
                raise
            uncancel()
            return attempt.interruption
        finally:
            if waiter is not None:
                waiter.cancel()

    async def _load(self, attempt: Attempt) -> str | None:
        """Read the payload; None if the claim is no longer ours. Waits for a database that is away."""
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
        """Call the handler and say what it did, whatever it did."""
        told = attempt.interruption
        if told is not None:  # before it began
            return told
        claim = attempt.claim
        handler = self._handlers[claim.handler]
        carry(claim.job_id, claim.schedule or claim.schedule_id)
        timer = None
        if claim.timeout is not None:
            interrupt = partial(attempt.interrupt, TimedOut(claim.timeout), grace=self._grace)
            left = claim.timeout.total_seconds()
            if claim.payload is None:
                left -= boottime() - attempt.started  # as long as it took to read the payload
            timer = asyncio.get_running_loop().call_later(left, interrupt)
        try:
            result = await self._calls[claim.handler](attempt, self._environment)
        except asyncio.CancelledError as error:
            if self._tasks.ending:
                raise
            cancelled = uncancel()
            if attempt.interruption is not None:
                return _instead(attempt, handler, attempt.interruption)
            return _instead(
                attempt, handler, CANCELLED_ITSELF if cancelled else await _described(error, attempt, handler)
            )
        except InvalidPayload as error:
            if attempt.began:
                return _instead(attempt, handler, await _described(error, attempt, handler))
            return Undecodable(type(error).__name__, plain(str(error), ERROR_LIMIT))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and attempt.interruption is not None:
                raise  # the third Ctrl-C, which ends the process wherever it is
            return _instead(attempt, handler, await _described(error, attempt, handler))
        finally:
            if timer is not None:
                timer.cancel()
        return _finished(attempt, handler, result)


def _context(handler: str, queue: str, attempt: int) -> Context:
    """Return what the contexts of such jobs are copies of: a copy costs less than setting three variables."""
    context = copy_context()
    context.run(carry_alike, handler, queue, attempt)
    return context


def _finished(attempt: Attempt, handler: Handler, result: Any) -> Outcome:
    if attempt.interruption is not None:
        uncancel()  # it was told to stop, and finished all the same
    if attempt.committed:
        return Committed()
    if attempt.completing:
        # What job.complete() wrote may have been committed or not: the database knows, and settle asks it.
        text = "the transaction in which job.complete() was called was not committed"
        return _instead(attempt, handler, Failed(kind="NotCommitted", text=text))
    return SUCCEEDED if result is None else Succeeded(encode_result(result))


async def _described(error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
    """Return the outcome for an exception of the handler's, off the main loop where its payload is large."""
    if len(attempt.payload) < OFF_LOOP_BYTES:
        return _outcome_of_safely(error, attempt, handler)
    before, attempt.on_interrupt = attempt.on_interrupt, _ignore  # an order to stop comes too late for the handler
    try:
        return await off_the_loop(partial(_outcome_of_safely, error, attempt, handler))
    finally:
        attempt.on_interrupt = before


def _ignore() -> None:
    return


def _outcome_of_safely(error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
    try:
        return _outcome_of(error, attempt, handler)
    except Exception as second:  # noqa: BLE001  a class of the handler's own: a Snooze, say, that never called super().__init__
        return describe(second, attempt)


def _outcome_of(error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
    match error:
        case Snooze():
            return Snoozed(error.after, error.at)
        case Retry():
            told = error.__cause__
            text = str(told) if isinstance(told, ChildFailed) else why_again(error, attempt)
            return Failed(kind="Retry", text=text, after=error.after, at=error.at)
        case Cancel():
            return Cancelled(readable(error.reason))
    if attempt.interruption is not None:
        return attempt.interruption
    if isinstance(error, ChildFailed):
        return Failed(kind=error.kind, text=str(error), permanent=error.permanent)
    return describe(error, attempt, handler.permanent)


def _instead(attempt: Attempt, handler: Handler, outcome: Outcome) -> Outcome:
    """A job that has been committed is done, whatever its handler did afterwards; a failed one waits as its handler says."""
    if attempt.committed:
        return Committed()
    if handler.backoff is not None and (delay := handler.delay_after(attempt.claim.attempt)) is not None:
        match outcome:
            case Failed(permanent=False, after=None, at=None) | TimedOut():
                return replace(outcome, after=delay)
    return outcome
