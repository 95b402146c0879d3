"""Predict when a job that keeps failing becomes a dead letter."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from rota.domain.backoff import backoff

if TYPE_CHECKING:
    from datetime import datetime

MAX_ATTEMPTS = 1000
"""The highest max_attempts that the table accepts. Bounds the loop for rows written without the constraints."""

LONGEST_DELAY = timedelta(days=366)
"""The longest backoff that the table accepts."""


class DeadLetterTime(NamedTuple):
    """The time range of the last failure, if every attempt fails at once. The attempts' own run time is not included."""

    earliest: datetime
    latest: datetime


def predict_dead_letter(
    *, attempt: int, at: datetime, max_attempts: int, base: timedelta, cap: timedelta, deadline: datetime | None = None
) -> DeadLetterTime:
    """Return when a job becomes a dead letter if attempt number `attempt` fails at `at` and all later ones fail, too.

    No retry is planned after `deadline`: the job becomes a dead letter as soon as its next retry would be later.
    """
    base, cap = min(base, LONGEST_DELAY), min(cap, LONGEST_DELAY)
    low = high = at
    earliest: datetime | None = None
    for failures in range(attempt, min(max_attempts, attempt + MAX_ATTEMPTS)):
        longest = backoff(failures, base=base, cap=cap, random=lambda: 1.0)
        shortest = backoff(failures, base=base, cap=cap, random=lambda: 0.0)
        if deadline is not None and high + longest > deadline:
            possible = max(low, deadline - longest)
            earliest = possible if earliest is None else min(earliest, possible)
            if low + shortest > deadline:
                return DeadLetterTime(earliest, high)
        low += shortest
        high = high + longest if deadline is None else max(at, min(high + longest, deadline))
    return DeadLetterTime(low if earliest is None else min(earliest, low), high)
