"""The preview of future fires and its notes on daylight saving time."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.cron import Cron
from rota.domain.preview import adjacent_instants, instants_between, moments_of_local_time, preview
from rota.domain.schedule import Rule
from schedule_rows import utc

BERLIN = "Europe/Berlin"


def test_a_fire_in_the_dst_gap_is_marked_under_both_policies() -> None:
    """In Berlin, 02:30 does not exist on 29 March 2026."""
    after = Rule(cron="30 2 * * *", timezone=BERLIN)
    (fired,) = preview(after, utc(2026, 3, 28, 12), 1)
    assert (fired.scheduled_for, fired.fires) == (utc(2026, 3, 29, 1), True)
    assert fired.note == "gap: the clock jumps from 02:00 to 03:00, fires once at the jump"

    skip = Rule(cron="30 2 * * *", timezone=BERLIN, dst_gap="skip")
    swallowed, following = preview(skip, utc(2026, 3, 28, 12), 1)
    assert (swallowed.fires, swallowed.note) == (False, "gap: the clock jumps from 02:00 to 03:00, skipped")
    assert following.scheduled_for == utc(2026, 3, 30, 0, 30)


def test_a_fire_at_the_end_of_the_gap_is_not_marked() -> None:
    """03:00 is the first local time after the jump."""
    (fired,) = preview(Rule(cron="0 3 * * *", timezone=BERLIN), utc(2026, 3, 28, 12), 1)
    assert (fired.scheduled_for, fired.note) == (utc(2026, 3, 29, 1), None)


@pytest.mark.parametrize(("fold", "fires"), [("first", [True, False]), ("both", [True, True])])
def test_a_fire_in_the_dst_fold_is_marked_on_both_passes(fold: str, fires: list[bool]) -> None:
    """In Berlin, 02:30 occurs twice on 25 October 2026."""
    rule = Rule(cron="30 2 * * *", timezone=BERLIN, dst_fold=fold)  # type: ignore[arg-type]
    found = [each for each in preview(rule, utc(2026, 10, 24, 12), 3) if each.note]
    assert [each.scheduled_for for each in found] == [utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1, 30)]
    assert [each.fires for each in found] == fires


def test_a_wildcard_hour_fires_in_both_passes_of_the_fold() -> None:
    """Every fire of such an expression is listed as firing."""
    found = preview(Rule(cron="30 * * * *", timezone=BERLIN, dst_gap="skip"), utc(2026, 10, 24, 23, 45), 3)
    assert [(each.local.hour, each.fires) for each in found] == [(2, True), (2, True), (3, True)]
    assert all(each.fires for each in preview(Rule(cron="30 * * * *", timezone=BERLIN), utc(2026, 3, 28), 60))


def test_the_preview_ends_with_the_schedule() -> None:
    """It then has fewer entries than requested."""
    rule = Rule(cron="0 0 * * *", end_at=utc(2026, 1, 3))
    assert [each.scheduled_for.day for each in preview(rule, utc(2026, 1, 1), 5)] == [2]


@given(
    st.datetimes(datetime(2025, 1, 1), datetime(2027, 12, 31)),  # noqa: DTZ001
    st.sampled_from(["30 2 * * *", "*/20 2 * * *", "0 0-4 * * *", "15 1,2,3 * * *"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    st.sampled_from(["after", "skip"]),
    st.sampled_from(["first", "both"]),
)
def test_the_preview_and_the_scheduler_agree_on_all_fires(
    naive: datetime, expr: str, timezone: str, gap: str, fold: str
) -> None:
    after = naive.replace(tzinfo=utc(2026, 1, 1).tzinfo)
    rule = Rule(cron=expr, timezone=timezone, dst_gap=gap, dst_fold=fold)  # type: ignore[arg-type]
    cron = Cron(expr, timezone=timezone, gap=gap, fold=fold)  # type: ignore[arg-type]
    assert [each.scheduled_for for each in preview(rule, after, 5) if each.fires] == cron.next(after, 5)


def test_a_local_time_has_one_or_two_instants_or_that_of_the_jump() -> None:
    """`rota why --at` without a zone uses this."""
    assert moments_of_local_time(datetime(2026, 7, 1, 2, 30), BERLIN) == [utc(2026, 7, 1, 0, 30)]  # noqa: DTZ001
    both_passes = [utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1, 30)]
    assert moments_of_local_time(datetime(2026, 10, 25, 2, 30), BERLIN) == both_passes  # noqa: DTZ001
    assert moments_of_local_time(datetime(2026, 3, 29, 2, 30), BERLIN) == [utc(2026, 3, 29, 1)]  # noqa: DTZ001


def test_adjacent_instants_are_the_nearest_before_and_after() -> None:
    """The given instant itself is excluded."""
    rule = Rule(cron="0 6 * * *")
    assert adjacent_instants(rule, utc(2026, 1, 2, 6)) == (utc(2026, 1, 1, 6), utc(2026, 1, 3, 6))
    assert adjacent_instants(rule, utc(2026, 1, 2, 7)) == (utc(2026, 1, 2, 6), utc(2026, 1, 3, 6))


def test_a_range_of_instants_includes_its_start_and_excludes_its_end() -> None:
    """Adjacent ranges therefore share no instant."""
    rule = Rule(every=timedelta(hours=1), anchor=utc(2026, 1, 1), start_at=utc(2026, 1, 1))
    assert list(instants_between(rule, utc(2026, 1, 1), utc(2026, 1, 1, 2))) == [utc(2026, 1, 1), utc(2026, 1, 1, 1)]
