"""Decisions about due instants, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.domain.schedule import MAX_COUNTED, Fire, Rule, plan
from rota.errors import InvalidCron

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


def rule(cron: str = "* * * * *", **columns: Any) -> Rule:
    return Rule(cron=cron, **columns)


def interval_rule(interval: timedelta, *, anchor: datetime = NOON, **columns: Any) -> Rule:
    return Rule(every=interval, anchor=anchor, **columns)


def summarize(fires: tuple[Fire, ...]) -> list[tuple[str, datetime]]:
    return [(fire.plan, fire.scheduled_for) for fire in fires]


def test_a_new_schedule_only_plans_its_next_instant() -> None:
    planned = plan(rule(), now=NOON, next_fire_at=None, base=NOON)
    assert (planned.next_fire_at, planned.decided_up_to, planned.fires) == (NOON + MINUTE, None, ())


def test_a_due_instant_fires_once_and_the_next_one_is_in_the_future() -> None:
    planned = plan(rule(), now=NOON + timedelta(milliseconds=3), next_fire_at=NOON)
    assert summarize(planned.fires) == [("enqueue", NOON)]
    assert (planned.decided_up_to, planned.next_fire_at) == (NOON, NOON + MINUTE)


def test_latest_runs_the_newest_missed_instant_and_records_the_others_once() -> None:
    """After downtime there is one late job for any number of missed instants."""
    now = NOON + HOUR + timedelta(minutes=5)
    planned = plan(rule("*/10 * * * *"), now=now, next_fire_at=NOON)
    missed, run = planned.fires
    assert (missed.plan, missed.missed_from, missed.scheduled_for) == ("skipped_misfire", NOON, NOON + 5 * 10 * MINUTE)
    assert missed.missed_count == 6
    assert (run.plan, run.scheduled_for) == ("enqueue", NOON + HOUR)
    assert planned.next_fire_at == NOON + HOUR + 10 * MINUTE


def test_an_instant_within_the_on_time_tolerance_is_no_misfire() -> None:
    """The scheduler's own delay must not skip a fire of a schedule with misfire = skip."""
    soon = plan(rule(misfire="skip"), now=NOON + timedelta(seconds=59), next_fire_at=NOON)
    late = plan(rule("0 * * * *", misfire="skip"), now=NOON + timedelta(seconds=60), next_fire_at=NOON)
    assert summarize(soon.fires) == [("enqueue", NOON)]
    assert summarize(late.fires) == [("skipped_misfire", NOON)]


def test_an_instant_on_time_supersedes_the_missed_ones() -> None:
    """After downtime, `latest` means one job and not one for the past and one for now."""
    now = NOON + timedelta(minutes=4, seconds=33)
    planned = plan(rule(), now=now, next_fire_at=NOON + MINUTE)
    assert summarize(planned.fires) == [("skipped_misfire", NOON + 3 * MINUTE), ("enqueue", NOON + 4 * MINUTE)]


def test_misfire_all_runs_the_last_missed_instants_oldest_first() -> None:
    """The limit prevents a flood after a long downtime. Instants beyond it are recorded as skipped."""
    now = NOON + timedelta(minutes=10)
    planned = plan(rule(misfire="all", catch_up_limit=3), now=now, next_fire_at=NOON)
    missed, *runs = planned.fires
    assert (missed.missed_from, missed.scheduled_for, missed.missed_count) == (NOON, NOON + 7 * MINUTE, 8)
    assert summarize(tuple(runs)) == [
        ("enqueue_or_wait", NOON + 8 * MINUTE),
        ("wait", NOON + 9 * MINUTE),
        ("wait", NOON + 10 * MINUTE),
    ]


def test_misfire_all_with_overlap_allow_enqueues_all_at_once() -> None:
    planned = plan(rule(misfire="all", overlap="allow"), now=NOON + 2 * MINUTE, next_fire_at=NOON)
    assert [fire.plan for fire in planned.fires] == ["enqueue", "enqueue", "enqueue"]


def test_an_instant_later_than_too_late_after_does_not_run() -> None:
    strict = rule("0 * * * *", misfire="latest", too_late_after=timedelta(minutes=1))
    assert summarize(plan(strict, now=NOON + timedelta(seconds=61), next_fire_at=NOON).fires) == [
        ("skipped_misfire", NOON)
    ]
    assert summarize(plan(strict, now=NOON + timedelta(seconds=59), next_fire_at=NOON).fires) == [("enqueue", NOON)]


def test_missed_instants_are_counted_up_to_a_thousand() -> None:
    """Planning must not take longer after a longer downtime."""
    now = NOON + timedelta(days=3)
    for each in (rule(), interval_rule(MINUTE)):
        missed, _ = plan(each, now=now, next_fire_at=NOON).fires
        assert missed.missed_count is None
    missed, _ = plan(rule(), now=NOON + MAX_COUNTED * MINUTE, next_fire_at=NOON).fires
    assert missed.missed_count == MAX_COUNTED


@pytest.mark.parametrize(
    ("overlap", "plans"),
    [
        ("allow", ["enqueue", "enqueue", "enqueue"]),
        ("skip", ["enqueue", "skipped_overlap", "skipped_overlap"]),
        ("queue_one", ["enqueue", "wait_behind_first", "skipped_overlap"]),
        ("replace", ["replaced", "replaced", "enqueue"]),
    ],
)
def test_several_instants_on_time_follow_the_overlap_rule(overlap: Any, plans: list[str]) -> None:
    """A short pause must not change how a schedule that fires each second behaves."""
    planned = plan(rule("* * * * * *", overlap=overlap), now=NOON + timedelta(seconds=2), next_fire_at=NOON)
    assert [fire.plan for fire in planned.fires] == plans


def test_an_interval_counts_from_its_anchor_across_restarts() -> None:
    planned = plan(interval_rule(timedelta(minutes=7)), now=NOON + HOUR, next_fire_at=None, base=NOON + HOUR)
    assert planned.next_fire_at == NOON + 9 * timedelta(minutes=7)


def test_an_interval_with_start_at_fires_first_at_start_at() -> None:
    """Holds also for searches that begin earlier, as previews and backfills do."""
    hourly = interval_rule(HOUR)
    assert hourly.first_after(NOON - 5 * HOUR) == NOON + HOUR
    assert hourly.last_until(NOON + HOUR, 5) == (NOON + HOUR,)
    assert hourly.last_until(NOON, 5) == ()
    since = interval_rule(HOUR, start_at=NOON)
    assert since.first_after(NOON - 5 * HOUR) == NOON
    assert since.last_until(NOON + HOUR, 5) == (NOON, NOON + HOUR)


def test_fires_lie_from_start_at_until_before_end_at() -> None:
    bounded = rule("0 * * * *", start_at=NOON, end_at=NOON + HOUR)
    assert plan(bounded, now=NOON - HOUR, next_fire_at=None, base=NOON - 5 * HOUR).next_fire_at == NOON
    last = plan(bounded, now=NOON, next_fire_at=NOON)
    assert (summarize(last.fires), last.next_fire_at) == ([("enqueue", NOON)], None)
    since = interval_rule(HOUR, anchor=NOON, start_at=NOON, end_at=NOON + 2 * HOUR)
    assert plan(since, now=NOON - HOUR, next_fire_at=None, base=NOON - HOUR).next_fire_at == NOON
    assert plan(since, now=NOON + 9 * HOUR, next_fire_at=NOON).next_fire_at is None


def test_the_instants_of_a_pause_are_recorded_in_one_row() -> None:
    planned = plan(rule("0 * * * *"), now=NOON, next_fire_at=None, base=NOON, paused_from=NOON - 5 * HOUR)
    (paused,) = planned.fires
    assert (paused.plan, paused.missed_from, paused.scheduled_for) == ("skipped_paused", NOON - 4 * HOUR, NOON)
    assert paused.missed_count == 5
    assert planned.next_fire_at == NOON + HOUR


def test_a_pause_without_instants_records_nothing() -> None:
    planned = plan(rule("0 0 * * *"), now=NOON, next_fire_at=None, base=NOON, paused_from=NOON - HOUR)
    assert planned.fires == ()


def test_a_fire_skipped_in_the_dst_gap_is_recorded() -> None:
    """In Vienna, 02:30 does not exist on 29 March 2026."""
    vienna = rule("30 2 * * *", timezone="Europe/Vienna", dst_gap="skip")
    before = datetime(2026, 3, 28, 1, 30, tzinfo=UTC)
    after = datetime(2026, 3, 30, 0, 30, tzinfo=UTC)
    assert plan(vienna, now=before, next_fire_at=before, base=before - HOUR).next_fire_at == after
    planned = plan(vienna, now=after, next_fire_at=after, base=before)
    assert summarize(planned.fires) == [("skipped_gap", datetime(2026, 3, 29, 1, tzinfo=UTC)), ("enqueue", after)]


def test_planning_with_an_invalid_expression_raises() -> None:
    """The scheduler then stops this schedule only."""
    with pytest.raises(InvalidCron):
        plan(rule(timezone="Europe/Berlln"), now=NOON, next_fire_at=None, base=NOON)


@settings(deadline=None)
@given(
    missed=st.integers(0, 400),
    seconds=st.integers(0, 59),
    misfire=st.sampled_from(["latest", "skip", "all"]),
    overlap=st.sampled_from(["allow", "skip", "queue_one", "replace"]),
    limit=st.integers(1, 20),
    too_late=st.none() | st.timedeltas(timedelta(seconds=1), timedelta(hours=5)),
    step=st.sampled_from([1, 5, 7]),
    by_cron=st.booleans(),
)
def test_every_due_instant_is_accounted_for_exactly_once(
    missed: int,
    seconds: int,
    misfire: Any,
    overlap: Any,
    limit: int,
    too_late: timedelta | None,
    step: int,
    by_cron: bool,
) -> None:
    """Each due instant is in exactly one row, and the number of rows stays small after any downtime."""
    columns: dict[str, Any] = {
        "misfire": misfire,
        "overlap": overlap,
        "catch_up_limit": limit,
        "too_late_after": too_late,
    }
    each = rule("* * * * *", **columns) if by_cron else interval_rule(step * MINUTE, **columns)
    step = 1 if by_cron else step
    now = NOON + missed * MINUTE + timedelta(seconds=seconds)
    planned = plan(each, now=now, next_fire_at=NOON)
    due = [NOON + n * step * MINUTE for n in range((now - NOON) // (step * MINUTE) + 1)]
    covered = []
    for fire in planned.fires:
        first = fire.missed_from or fire.scheduled_for
        stretch = [instant for instant in due if first <= instant <= fire.scheduled_for]
        assert fire.missed_from is None or fire.missed_count == len(stretch)
        covered += stretch
    assert covered == due
    assert planned.decided_up_to == due[-1]
    assert planned.next_fire_at == due[-1] + step * MINUTE
    assert len(planned.fires) <= limit + 1
    tried = [fire for fire in planned.fires if fire.plan not in {"skipped_misfire", "skipped_overlap", "replaced"}]
    assert all(too_late is None or now - fire.scheduled_for <= too_late for fire in tried)
    if misfire == "skip":
        assert all(now - fire.scheduled_for < each.on_time_within for fire in tried)
