"""What is shown of the instants ahead: each with what daylight saving does to it."""

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


def test_the_gap_is_marked_whether_it_fires_or_not() -> None:
    """Berlin, 29 March 2026: 02:30 does not exist."""
    after = Rule(cron="30 2 * * *", timezone=BERLIN)
    (fired,) = preview(after, utc(2026, 3, 28, 12), 1)
    assert (fired.scheduled_for, fired.fires) == (utc(2026, 3, 29, 1), True)
    assert fired.note == "gap: the clock jumps from 02:00 to 03:00, fires once at the jump"

    skip = Rule(cron="30 2 * * *", timezone=BERLIN, dst_gap="skip")
    swallowed, following = preview(skip, utc(2026, 3, 28, 12), 1)
    assert (swallowed.fires, swallowed.note) == (False, "gap: the clock jumps from 02:00 to 03:00, skipped")
    assert following.scheduled_for == utc(2026, 3, 30, 0, 30)


def test_an_entry_at_the_jump_itself_is_no_gap() -> None:
    """03:00 is the first reading after it."""
    (fired,) = preview(Rule(cron="0 3 * * *", timezone=BERLIN), utc(2026, 3, 28, 12), 1)
    assert (fired.scheduled_for, fired.note) == (utc(2026, 3, 29, 1), None)


@pytest.mark.parametrize(("fold", "fires"), [("first", [True, False]), ("both", [True, True])])
def test_the_fold_is_marked_on_both_passes(fold: str, fires: list[bool]) -> None:
    """Berlin, 25 October 2026: 02:30 comes twice."""
    rule = Rule(cron="30 2 * * *", timezone=BERLIN, dst_fold=fold)  # type: ignore[arg-type]
    found = [each for each in preview(rule, utc(2026, 10, 24, 12), 3) if each.note]
    assert [each.scheduled_for for each in found] == [utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1, 30)]
    assert [each.fires for each in found] == fires


def test_a_wildcard_entry_follows_real_time() -> None:
    """It fires in both passes, and nothing of it is ever left out."""
    found = preview(Rule(cron="30 * * * *", timezone=BERLIN, dst_gap="skip"), utc(2026, 10, 24, 23, 45), 3)
    assert [(each.local.hour, each.fires) for each in found] == [(2, True), (2, True), (3, True)]
    assert all(each.fires for each in preview(Rule(cron="30 * * * *", timezone=BERLIN), utc(2026, 3, 28), 60))


def test_there_may_be_fewer_than_asked_for() -> None:
    """At its end a schedule has no more."""
    rule = Rule(cron="0 0 * * *", end_at=utc(2026, 1, 3))
    assert [each.scheduled_for.day for each in preview(rule, utc(2026, 1, 1), 5)] == [2]


@given(
    st.datetimes(datetime(2025, 1, 1), datetime(2027, 12, 31)),  # noqa: DTZ001
    st.sampled_from(["30 2 * * *", "*/20 2 * * *", "0 0-4 * * *", "15 1,2,3 * * *"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    st.sampled_from(["after", "skip"]),
    st.sampled_from(["first", "both"]),
)
def test_what_fires_is_what_the_scheduler_fires(naive: datetime, expr: str, timezone: str, gap: str, fold: str) -> None:
    """One path from an expression to instants: the preview may say more, never something else."""
    after = naive.replace(tzinfo=utc(2026, 1, 1).tzinfo)
    rule = Rule(cron=expr, timezone=timezone, dst_gap=gap, dst_fold=fold)  # type: ignore[arg-type]
    cron = Cron(expr, timezone=timezone, gap=gap, fold=fold)  # type: ignore[arg-type]
    assert [each.scheduled_for for each in preview(rule, after, 5) if each.fires] == cron.next(after, 5)


def test_a_reading_is_shown_once_twice_or_at_the_jump() -> None:
    """What `rota why --at` without a zone means."""
    assert moments_of_local_time(datetime(2026, 7, 1, 2, 30), BERLIN) == [utc(2026, 7, 1, 0, 30)]  # noqa: DTZ001
    both = [utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1, 30)]
    assert moments_of_local_time(datetime(2026, 10, 25, 2, 30), BERLIN) == both  # noqa: DTZ001
    assert moments_of_local_time(datetime(2026, 3, 29, 2, 30), BERLIN) == [utc(2026, 3, 29, 1)]  # noqa: DTZ001


def test_neighbours_are_the_nearest_on_either_side() -> None:
    """The instant itself is neither."""
    rule = Rule(cron="0 6 * * *")
    assert adjacent_instants(rule, utc(2026, 1, 2, 6)) == (utc(2026, 1, 1, 6), utc(2026, 1, 3, 6))
    assert adjacent_instants(rule, utc(2026, 1, 2, 7)) == (utc(2026, 1, 2, 6), utc(2026, 1, 3, 6))


def test_a_stretch_has_its_start_and_not_its_end() -> None:
    """So that two stretches which meet share no instant."""
    rule = Rule(every=timedelta(hours=1), anchor=utc(2026, 1, 1), start_at=utc(2026, 1, 1))
    assert list(instants_between(rule, utc(2026, 1, 1), utc(2026, 1, 1, 2))) == [utc(2026, 1, 1), utc(2026, 1, 1, 1)]
