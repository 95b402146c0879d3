"""Decide what becomes of a job after an attempt: outcome -> settlement. Pure functions."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, assert_never

from rota.domain.backoff import backoff
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from rota.domain.job import Terms

MAX_LOSSES = 3
"""A job that lost its worker this often becomes a dead letter with reason `poison`."""

NOW = timedelta(0)

ABANDONED_DELAY = timedelta(seconds=2)
"""Minimum delay after an attempt whose handler did not stop. It is settled shortly before its lease ends, which must end first."""

BASE, CAP = timedelta(seconds=5), timedelta(hours=1)
"""The backoff of jobs whose row has none."""


def decide(terms: Terms, outcome: Outcome, random: Callable[[], float]) -> Settlement:  # noqa: PLR0912  one case an outcome
    """Return what becomes of the job. Delays count from the database's now() when the settlement is written."""
    at_most_once = terms.delivery == "at_most_once"
    match outcome:
        case Succeeded(result):
            return Succeed(result)
        case Committed() | LeaseLost():
            return Abandon()
        case Cancelled(reason):
            return Cancel(reason)
        case Undecodable():
            return Bury("bad_payload")
        case Interrupted(began=False):
            return Release(NOW)
        case Interrupted(still_running=still_running):
            return Bury("lost") if at_most_once else Release(None if still_running else NOW)
        case Snoozed(after, at):
            return Bury("exhausted") if at_most_once else Release(after, at)
        case Held(run_at=run_at):
            return Bury("exhausted") if at_most_once else Release(None, run_at)
        case Failed(permanent=True):
            return Bury("permanent")
        case Failed(after=after, at=at):
            return _retry_or_bury(terms, after, at, random)
        case TimedOut(after=after, abandoned=abandoned):
            return _retry_or_bury(terms, after, None, random, min_delay=ABANDONED_DELAY if abandoned else NOW)
        case HolderLost():
            return _after_loss(terms, random)
        case _:
            assert_never(outcome)


def _retry_or_bury(
    terms: Terms,
    after: timedelta | None,
    at: datetime | None,
    random: Callable[[], float],
    *,
    min_delay: timedelta = NOW,
) -> Settlement:
    if terms.delivery == "at_most_once" or terms.attempt >= (terms.max_attempts or 1):
        return Bury("exhausted")
    delay = after if after is not None else NOW if at is not None else _backoff(terms, terms.attempt, random)
    delay = max(delay, min_delay)
    if terms.retry_left is not None and delay > terms.retry_left:
        return Bury("expired")
    if terms.retry_until is not None and at is not None and at > terms.retry_until:
        return Bury("expired")
    return Retry(delay, at)


def _after_loss(terms: Terms, random: Callable[[], float]) -> Settlement:
    if terms.delivery == "at_most_once":
        return Bury("lost")
    if terms.losses + 1 >= MAX_LOSSES:
        return Bury("poison")
    if terms.attempt >= (terms.max_attempts or 1):
        return Bury("exhausted")
    # The first loss is probably not the job's fault, so it runs again at once. After a second loss it waits.
    delay = _backoff(terms, terms.losses, random) if terms.losses else NOW
    if terms.retry_left is not None and delay > terms.retry_left:
        return Bury("expired")
    return Retry(delay)


def _backoff(terms: Terms, failures: int, random: Callable[[], float]) -> timedelta:
    return backoff(failures, base=terms.backoff_base or BASE, cap=terms.backoff_cap or CAP, random=random)
