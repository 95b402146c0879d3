"""When a job that goes on failing will be given up."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from rota.domain.backoff import backoff

if TYPE_CHECKING:
    from datetime import datetime

MOST_ATTEMPTS = 1000
"""The highest max_attempts that can be inserted. A row that was written without the constraints must not cost more."""

LONGEST_DELAY = timedelta(days=366)
"""The longest backoff that can be inserted, for the same reason."""


class GivenUp(NamedTuple):
    """The span in which the last attempt fails, if every attempt fails at once; what attempts take comes on top."""

    earliest: datetime
    latest: datetime


def given_up(
    *, attempt: int, at: datetime, max_attempts: int, base: timedelta, cap: timedelta, deadline: datetime | None = None
) -> GivenUp:
    """Return when the job becomes a dead letter, whose attempt number `attempt` fails at `at`, as will all that follow.

    `deadline`: no retry is planned beyond it; a delay that leads there ends the job when it is planned.
    """
    base, cap = min(base, LONGEST_DELAY), min(cap, LONGEST_DELAY)
    low = high = at
    earliest: datetime | None = None
    for failures in range(attempt, min(max_attempts, attempt + MOST_ATTEMPTS)):
        longest = backoff(failures, base=base, cap=cap, random=lambda: 1.0)
        shortest = backoff(failures, base=base, cap=cap, random=lambda: 0.0)
        if deadline is not None and high + longest > deadline:
            possible = max(low, deadline - longest)
            earliest = possible if earliest is None else min(earliest, possible)
            if low + shortest > deadline:
                return GivenUp(earliest, high)
        low += shortest
        high = high + longest if deadline is None else max(at, min(high + longest, deadline))
    return GivenUp(low if earliest is None else min(earliest, low), high)
