"""How long to wait before the next attempt."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_DELAY = timedelta(microseconds=1)

MAX_DOUBLINGS = 64
"""Enough to grow from one microsecond to any cap."""


def backoff(failures: int, *, base: timedelta, cap: timedelta, random: Callable[[], float]) -> timedelta:
    """Return base * 2^(failures - 1), at most `cap`, times a random factor from 0.5 to 1.

    `failures` counts from 1; `random` returns a number in [0, 1). Never overflows, whatever its arguments.
    """
    delay, cap = max(base, MIN_DELAY), max(cap, MIN_DELAY)
    for _ in range(min(failures - 1, MAX_DOUBLINGS)):
        if delay >= cap:
            break
        delay = min(delay, cap / 2) * 2
    delay = min(delay, cap)
    return delay * (0.5 + random() / 2)  # multiply once: the sum of two rounded halves may exceed the cap
