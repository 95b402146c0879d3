"""Turn what a call of a handler did (returned, raised, was interrupted, could not decode its payload) into an outcome."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rota.domain.outcome import Cancelled, Committed, Failed, Held, Outcome, Snoozed, Succeeded, TimedOut, Undecodable
from rota.domain.payload import encode_result, storable_text
from rota.errors import InvalidPayload
from rota.handler_exceptions import Cancel, Hold, Retry, Snooze
from rota.handlers.byte_budget import OFF_LOOP_BYTES, off_the_loop
from rota.handlers.failure import ERROR_LIMIT, failure_of, reason_text, retry_error_text
from rota.handlers.python import ChildFailed
from rota.supervision.loop import uncancel

if TYPE_CHECKING:
    from rota.handlers import Handler
    from rota.handlers.attempt import Attempt

SUCCEEDED = Succeeded()
"""The outcome of most attempts."""

NOT_COMMITTED = Failed(kind="NotCommitted", text="the transaction in which job.complete() was called was not committed")
"""The transaction may have been committed after all: `settle` asks the database."""

CANCELLED_ITSELF = Failed(
    kind="CancelledError", text="the handler cancelled its own task: to end a job, raise rota.Cancel or return"
)


async def outcome_of_call(attempt: Attempt, handler: Handler, result: Any, error: BaseException | None) -> Outcome:
    """Return the outcome of a call that raised `error`, or that returned `result` if `error` is None."""
    interrupted = attempt.interruption is not None
    was_cancelled = isinstance(error, asyncio.CancelledError)
    cancellations = uncancel() if was_cancelled or (interrupted and error is None) else 0
    if error is None:
        if not attempt.completing and not attempt.committed:
            return SUCCEEDED if result is None else Succeeded(encode_result(result))
        outcome: Outcome = NOT_COMMITTED
    elif was_cancelled and attempt.interruption is not None:
        outcome = attempt.interruption
    elif was_cancelled and cancellations:
        outcome = CANCELLED_ITSELF
    elif len(attempt.payload) < OFF_LOOP_BYTES:
        outcome = _outcome_of_error(error, attempt, handler)
    else:
        # Masking the values of a large payload takes long. The handler has ended, so an order to stop must not cancel this.
        on_interrupt, attempt.on_interrupt = attempt.on_interrupt, _ignore
        try:
            outcome = await off_the_loop(partial(_outcome_of_error, error, attempt, handler))
        finally:
            attempt.on_interrupt = on_interrupt
    return apply_commit_and_backoff(attempt, handler, outcome)


def apply_commit_and_backoff(attempt: Attempt, handler: Handler, outcome: Outcome) -> Outcome:
    """Return Committed if the job was committed, whatever its handler did then; give a failure the handler's own delay."""
    if attempt.committed:
        return Committed()
    if handler.backoff is not None and (delay := handler.delay_after(attempt.claim.attempt)) is not None:
        match outcome:
            case Failed(permanent=False, after=None, at=None) | TimedOut():
                return replace(outcome, after=delay)
    return outcome


def _ignore() -> None:
    return


def _outcome_of_error(error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
    try:
        match error:
            case InvalidPayload() if not attempt.handler_called:
                return Undecodable(type(error).__name__, storable_text(str(error), ERROR_LIMIT))
            case Hold() if (key := attempt.claim.limit_key) is not None:
                return Held(key, attempt.claim.run_at, error.after, error.at)
            case Snooze() | Hold():
                return Snoozed(error.after, error.at)
            case Retry():
                cause = error.__cause__
                text = str(cause) if isinstance(cause, ChildFailed) else retry_error_text(error, attempt)
                return Failed(kind="Retry", text=text, after=error.after, at=error.at)
            case Cancel():
                return Cancelled(reason_text(error.reason))
        if attempt.interruption is not None:
            return attempt.interruption
        if isinstance(error, ChildFailed):
            return Failed(kind=error.kind, text=str(error), permanent=error.permanent)
        return failure_of(error, attempt, handler.permanent)
    except Exception as own_error:  # noqa: BLE001  such as a subclass of Snooze that never called super().__init__
        return failure_of(own_error, attempt)
