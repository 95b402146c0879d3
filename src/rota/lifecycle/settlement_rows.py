"""The contents of a settlement: the arguments of settle_unfinished.sql, and the log line that reports it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

from rota.domain.forecast import predict_dead_letter
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
    Held,
    HolderLost,
    Interrupted,
    LeaseLost,
    Outcome,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
)
from rota.domain.settlement import Abandon, Bury, Cancel, Release, Retry, Settlement, Succeed
from rota.lifecycle.retry_planner import BASE, CAP

if TYPE_CHECKING:
    from rota.db.queries import SettlementRow
    from rota.domain.job import Terms
    from rota.observability.telemetry import Telemetry

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

REPORTED_SETTLEMENT = {"retry": "retried", "release": "released", "bury": "dead", "cancel": "cancelled"}
"""The statement's name of a settlement -> its name in logs and metrics."""

UNSTORABLE = "SettlementRejected"
"""The error kind of an attempt whose outcome the database refused to store."""


def settlement_row(terms: Terms, outcome: Outcome, settlement: Settlement) -> SettlementRow | None:
    """Return the row of settle_unfinished.sql that writes this settlement, or None if there is nothing to write."""
    name, kind, text = outcome_columns(outcome)
    attempt = (terms.job_id, terms.fence_token, terms.leased_by)
    match settlement:
        case Retry(delay, at):
            return (*attempt, "retry", delay, at, name, None, kind, text)
        case Release(delay, at):
            return (*attempt, "release", delay, at, name, None, kind, text)
        case Bury(reason):
            return (*attempt, "bury", None, None, name, reason, kind, text)
        case Cancel(reason):
            return (*attempt, "cancel", None, None, name, reason, kind, text)
        case Succeed() | Abandon():
            return None
        case _:
            assert_never(settlement)


def outcome_columns(outcome: Outcome) -> tuple[str, str | None, str | None]:
    """Return the columns of rota.attempts for an outcome: outcome, error_kind, error."""
    match outcome:
        case Failed(kind=kind, text=text):
            return "failed", kind, text
        case Undecodable(kind, text):
            return "undecodable", kind, text
        case TimedOut(timeout, abandoned=abandoned):
            note = f"; the handler did not stop: its {abandoned} was abandoned, and keeps its slot until it ends"
            return "timed_out", "Timeout", f"ran longer than its timeout of {timeout}{note if abandoned else ''}"
        case Snoozed():
            return "snoozed", None, None
        case Held():
            return "held", None, None
        case Cancelled(reason):
            return "cancelled", None, reason
        case Interrupted():
            return "interrupted", None, "the daemon was stopped"
        case HolderLost():
            return "lost", "LeaseExpired", "its lease expired: the daemon that ran it died, hung, or was cut off"
        case LeaseLost():
            return "lost", None, None
        case Succeeded() | Committed():
            return "succeeded", None, None
        case _:
            assert_never(outcome)


def simpler_outcome(outcome: Outcome, kind: str) -> Outcome | None:
    """Return an outcome that is easier to store than the one that the database refused with error `kind`; None if there is none.

    The last one tried is a dead letter without the error's text.
    """
    match outcome:
        case Succeeded(result) if result is not None:
            return Succeeded(None)
        case Succeeded():
            return Failed(
                kind=UNSTORABLE, text=f"the attempt succeeded, which could not be stored: {kind}", permanent=True
            )
        case Failed(kind=error_kind, permanent=permanent) if error_kind != UNSTORABLE:
            return Failed(kind=UNSTORABLE, text=f"the handler's error could not be stored: {kind}", permanent=permanent)
        case Failed(permanent=True):
            return None
        case _:
            return Failed(kind=UNSTORABLE, text=f"the job could not be settled as asked: {kind}", permanent=True)


def report_settlement(
    telemetry: Telemetry,
    terms: Terms,
    outcome: Outcome,
    settlement: Settlement,
    written_as: str,
    *,
    seconds: float | None,
) -> None:
    """Report the settlement of an attempt that did not succeed."""
    name, kind, error = outcome_columns(outcome)
    due = gives_up = None
    if written_as != "cancel" and isinstance(settlement, Retry | Release):
        due = _due_in(settlement)
        if due is not None and isinstance(settlement, Retry):
            gives_up = gives_up_in(terms, due)
    telemetry.job_settled(
        job_id=terms.job_id,
        handler=terms.handler,
        queue=terms.queue,
        settlement=REPORTED_SETTLEMENT[written_as],
        outcome=name,
        attempt=terms.attempt,
        seconds=seconds,
        error=error,
        max_attempts=terms.max_attempts,
        releases=terms.releases or None,
        kind=kind,
        reason=settlement.reason if isinstance(settlement, Bury) and written_as == "bury" else None,
        due_in_s=None if due is None else round(due.total_seconds(), 3),
        gives_up_in_s=None if gives_up is None else round(gives_up.total_seconds()),
        do=f"rota dead show {terms.job_id}, and redrive or discard it" if written_as == "bury" else None,
    )


def gives_up_in(terms: Terms, due: timedelta) -> timedelta:
    """Return the longest time until a job that keeps failing becomes a dead letter, without the duration of its attempts.

    `due`: time until its next attempt.
    """
    later_delays = _total_of_later_delays(
        terms.attempt + 1, terms.max_attempts or 1, terms.backoff_base or BASE, terms.backoff_cap or CAP
    )
    return due + later_delays if terms.retry_left is None else max(due, min(due + later_delays, terms.retry_left))


@lru_cache(1024)
def _total_of_later_delays(attempt: int, max_attempts: int, base: timedelta, cap: timedelta) -> timedelta:
    # Cached: it sums up to a thousand delays, and a thousand jobs may fail together.
    return predict_dead_letter(attempt=attempt, at=EPOCH, max_attempts=max_attempts, base=base, cap=cap).latest - EPOCH


def _due_in(settlement: Retry | Release) -> timedelta | None:
    """Return the time until the next attempt, for the log. A requested instant is compared with this machine's clock."""
    if settlement.at is not None:
        return max(timedelta(0), settlement.at - datetime.now(UTC))
    return settlement.delay
