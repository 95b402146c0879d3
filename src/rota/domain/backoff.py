"""How long to wait before the next attempt."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST = timedelta(microseconds=1)

MAX_DOUBLINGS = 64
"""Enough to get from a microsecond to any cap."""


def backoff(failures: int, *, base: timedelta, cap: timedelta, random: Callable[[], float]) -> timedelta:
    """Return base * 2^(failures - 1), at most cap, jittered between half of it and all of it.

    `failures` counts from 1; `random` returns a number in [0, 1). Never overflows, whatever its arguments.
    """
    delay, cap = max(base, SHORTEST), max(cap, SHORTEST)
    for _ in range(min(failures - 1, MAX_DOUBLINGS)):
        if delay >= cap:
            break
        delay = min(delay, cap / 2) * 2
    delay = min(delay, cap)
    return delay * (0.5 + random() / 2)  # once rounded: two halves may be more than the whole
