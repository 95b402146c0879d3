"""Step 5 of a job's life: outcome -> settlement, purely."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, assert_never

from rota.domain.backoff import backoff
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
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
"""A job that lost its worker this often is poison."""

NOW = timedelta(0)

ABANDONED_DELAY = timedelta(seconds=2)
"""Until the lease of an attempt whose handler did not stop has surely ended: it is settled shortly before."""

BASE, CAP = timedelta(seconds=5), timedelta(hours=1)
"""The backoff of jobs that were claimed without one."""


def decide(terms: Terms, outcome: Outcome, random: Callable[[], float]) -> Settlement:
    """Say what becomes of the job. Delays count from the database's now() when the settlement is written."""
    once = terms.delivery == "at_most_once"
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
            return Bury("lost") if once else Release(None if still_running else NOW)
        case Snoozed(after, at):
            return Bury("exhausted") if once else Release(after, at)
        case Failed(permanent=True):
            return Bury("permanent")
        case Failed(after=after, at=at):
            return _again(terms, after, at, random)
        case TimedOut(after=after, abandoned=abandoned):
            return _again(terms, after, None, random, least=ABANDONED_DELAY if abandoned else NOW)
        case HolderLost():
            return _after_loss(terms, random)
        case _:
            assert_never(outcome)


def _again(
    terms: Terms, after: timedelta | None, at: datetime | None, random: Callable[[], float], *, least: timedelta = NOW
) -> Settlement:
    if terms.delivery == "at_most_once" or terms.attempt >= (terms.max_attempts or 1):
        return Bury("exhausted")
    delay = after if after is not None else NOW if at is not None else _backoff(terms, terms.attempt, random)
    delay = max(delay, least)
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
    # The first loss says nothing against the job; who loses its worker again is made to wait.
    delay = _backoff(terms, terms.losses, random) if terms.losses else NOW
    if terms.retry_left is not None and delay > terms.retry_left:
        return Bury("expired")
    return Retry(delay)


def _backoff(terms: Terms, failures: int, random: Callable[[], float]) -> timedelta:
    return backoff(failures, base=terms.backoff_base or BASE, cap=terms.backoff_cap or CAP, random=random)
