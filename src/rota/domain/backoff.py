"""How long to wait before the next attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


def backoff(failures: int, *, base: timedelta, cap: timedelta, random: Callable[[], float]) -> timedelta:
    """Return base * 2^(failures - 1), at most cap, jittered between half of it and all of it.

    `failures` counts from 1; `random` returns a number in [0, 1). Never overflows, whatever the number of failures.
    """
    delay = base
    for _ in range(failures - 1):
        if delay >= cap:
            break
        delay *= 2
    delay = min(delay, cap)
    return delay * (0.5 + random() / 2)  # once rounded: two halves may be more than the whole
