"""The backoff doubles up to a cap, has jitter in its upper half, and never overflows."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.domain.backoff import backoff

BASE, CAP = timedelta(seconds=5), timedelta(hours=1)
TICK = timedelta(microseconds=2)
durations = st.timedeltas(timedelta(microseconds=1), timedelta(days=366))


@pytest.mark.parametrize(
    ("failures", "longest"),
    [(1, 5), (2, 10), (3, 20), (10, 2560), (11, 3600), (12, 3600), (10**6, 3600)],
)
def test_the_delay_doubles_with_each_failure_up_to_the_cap(failures: int, longest: int) -> None:
    """Jitter chooses between half of min(base * 2^(n-1), cap) and all of it."""
    assert backoff(failures, base=BASE, cap=CAP, random=lambda: 1.0) == timedelta(seconds=longest)
    assert backoff(failures, base=BASE, cap=CAP, random=lambda: 0.0) == timedelta(seconds=longest / 2)
    assert backoff(failures, base=BASE, cap=CAP, random=lambda: 0.5) == timedelta(seconds=longest * 0.75)


@example(failures=9, base=timedelta(microseconds=1), cap=timedelta(microseconds=3), random=0.75)
@given(st.integers(1, 10**9), durations, durations, st.floats(0, 1, exclude_max=True))
def test_jitter_keeps_the_delay_between_half_and_all_of_the_full_delay(
    failures: int, base: timedelta, cap: timedelta, random: float
) -> None:
    """Holds for all arguments; the delay is never above the cap."""
    delay = backoff(failures, base=base, cap=cap, random=lambda: random)
    full = backoff(failures, base=base, cap=cap, random=lambda: 1.0)
    assert full / 2 - TICK <= delay <= full + TICK
    assert delay <= cap


@given(st.integers(1, 200), durations, durations)
def test_the_delay_never_shrinks_with_further_failures(failures: int, base: timedelta, cap: timedelta) -> None:
    shorter = backoff(failures, base=base, cap=cap, random=lambda: 1.0)
    assert backoff(failures + 1, base=base, cap=cap, random=lambda: 1.0) >= shorter - TICK


@pytest.mark.parametrize("base", [timedelta.min, timedelta(days=-1), timedelta(0), timedelta.max])
@pytest.mark.parametrize("cap", [timedelta.min, timedelta(0), timedelta(seconds=1), timedelta.max])
def test_out_of_range_base_and_cap_neither_raise_nor_take_long(base: timedelta, cap: timedelta) -> None:
    """The owner of the tables can store such values: they must not stop the settle loop."""
    assert backoff(2**31, base=base, cap=cap, random=lambda: 0.0) >= timedelta(0)
