"""What becomes of due instants, decided without a database."""

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


def every(interval: timedelta, *, anchor: datetime = NOON, **columns: Any) -> Rule:
    return Rule(every=interval, anchor=anchor, **columns)


def told(fires: tuple[Fire, ...]) -> list[tuple[str, datetime]]:
    return [(fire.plan, fire.scheduled_for) for fire in fires]


def test_what_is_not_due_yet_is_only_planned() -> None:
    """A new schedule gets its next instant, and nothing fires because of its being new."""
    planned = plan(rule(), now=NOON, next_fire_at=None, base=NOON)
    assert (planned.next_fire_at, planned.decided_up_to, planned.fires) == (NOON + MINUTE, None, ())


def test_a_due_instant_runs_once_and_the_next_one_is_later_than_now() -> None:
    """The plain case: one fire, and the clock moves on."""
    planned = plan(rule(), now=NOON + timedelta(milliseconds=3), next_fire_at=NOON)
    assert told(planned.fires) == [("enqueue", NOON)]
    assert (planned.decided_up_to, planned.next_fire_at) == (NOON, NOON + MINUTE)


def test_latest_runs_the_newest_missed_and_writes_the_others_as_one_stretch() -> None:
    """After downtime there is one late job, however many instants were missed."""
    now = NOON + HOUR + timedelta(minutes=5)
    planned = plan(rule("*/10 * * * *"), now=now, next_fire_at=NOON)
    missed, run = planned.fires
    assert (missed.plan, missed.missed_from, missed.scheduled_for) == ("skipped_misfire", NOON, NOON + 5 * 10 * MINUTE)
    assert missed.missed_count == 6
    assert (run.plan, run.scheduled_for) == ("enqueue", NOON + HOUR)
    assert planned.next_fire_at == NOON + HOUR + 10 * MINUTE


def test_an_instant_within_on_time_is_no_misfire() -> None:
    """The scheduler's own backlog must not make a schedule with misfire = skip lose a run."""
    soon = plan(rule(misfire="skip"), now=NOON + timedelta(seconds=59), next_fire_at=NOON)
    late = plan(rule("0 * * * *", misfire="skip"), now=NOON + timedelta(seconds=60), next_fire_at=NOON)
    assert told(soon.fires) == [("enqueue", NOON)]
    assert told(late.fires) == [("skipped_misfire", NOON)]


def test_missed_ones_are_superseded_by_one_that_is_on_time() -> None:
    """Latest means one run after a pause, not one for the past and one for now."""
    now = NOON + timedelta(minutes=4, seconds=33)
    planned = plan(rule(), now=now, next_fire_at=NOON + MINUTE)
    assert told(planned.fires) == [("skipped_misfire", NOON + 3 * MINUTE), ("enqueue", NOON + 4 * MINUTE)]


def test_all_runs_the_last_ones_oldest_first_in_turn() -> None:
    """The limit keeps a long downtime from becoming a flood; what is beyond it is written down."""
    now = NOON + timedelta(minutes=10)
    planned = plan(rule(misfire="all", catch_up_limit=3), now=now, next_fire_at=NOON)
    missed, *rest = planned.fires
    assert (missed.missed_from, missed.scheduled_for, missed.missed_count) == (NOON, NOON + 7 * MINUTE, 8)
    assert told(tuple(rest)) == [
        ("enqueue_or_wait", NOON + 8 * MINUTE),
        ("wait", NOON + 9 * MINUTE),
        ("wait", NOON + 10 * MINUTE),
    ]


def test_all_with_allow_runs_them_side_by_side() -> None:
    """Whoever allows overlap doesn't want his jobs one after the other."""
    planned = plan(rule(misfire="all", overlap="allow"), now=NOON + 2 * MINUTE, next_fire_at=NOON)
    assert [fire.plan for fire in planned.fires] == ["enqueue", "enqueue", "enqueue"]


def test_nothing_runs_that_is_later_than_too_late_after() -> None:
    """A report of yesterday's numbers at noon is worse than none."""
    strict = rule("0 * * * *", misfire="latest", too_late_after=timedelta(minutes=1))
    assert told(plan(strict, now=NOON + timedelta(seconds=61), next_fire_at=NOON).fires) == [("skipped_misfire", NOON)]
    assert told(plan(strict, now=NOON + timedelta(seconds=59), next_fire_at=NOON).fires) == [("enqueue", NOON)]


def test_more_than_a_thousand_missed_ones_are_not_counted() -> None:
    """Counting must not cost more the longer the downtime was."""
    now = NOON + timedelta(days=3)
    for each in (rule(), every(MINUTE)):
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
def test_several_on_time_at_once_follow_the_overlap_rule(overlap: Any, plans: list[str]) -> None:
    """A hiccup of a few seconds must not treat a schedule that fires each second otherwise than a quiet run would."""
    planned = plan(rule("* * * * * *", overlap=overlap), now=NOON + timedelta(seconds=2), next_fire_at=NOON)
    assert [fire.plan for fire in planned.fires] == plans


def test_every_counts_from_its_anchor_and_a_restart_does_not_shift_it() -> None:
    """Absolute time: instants stay where they are, whoever looks and when."""
    planned = plan(every(timedelta(minutes=7)), now=NOON + HOUR, next_fire_at=None, base=NOON + HOUR)
    assert planned.next_fire_at == NOON + 9 * timedelta(minutes=7)


def test_every_fires_at_start_at_and_not_at_its_creation() -> None:
    """Also for who asks about times before that: a preview, a backfill."""
    made = every(HOUR)
    assert made.first_after(NOON - 5 * HOUR) == NOON + HOUR
    assert made.last_until(NOON + HOUR, 5) == (NOON + HOUR,)
    assert made.last_until(NOON, 5) == ()
    since = every(HOUR, start_at=NOON)
    assert since.first_after(NOON - 5 * HOUR) == NOON
    assert since.last_until(NOON + HOUR, 5) == (NOON, NOON + HOUR)


def test_a_fire_lies_between_start_and_end() -> None:
    """start_at ≤ fire < end_at."""
    bounded = rule("0 * * * *", start_at=NOON, end_at=NOON + HOUR)
    assert plan(bounded, now=NOON - HOUR, next_fire_at=None, base=NOON - 5 * HOUR).next_fire_at == NOON
    last = plan(bounded, now=NOON, next_fire_at=NOON)
    assert (told(last.fires), last.next_fire_at) == ([("enqueue", NOON)], None)
    since = every(HOUR, anchor=NOON, start_at=NOON, end_at=NOON + 2 * HOUR)
    assert plan(since, now=NOON - HOUR, next_fire_at=None, base=NOON - HOUR).next_fire_at == NOON
    assert plan(since, now=NOON + 9 * HOUR, next_fire_at=NOON).next_fire_at is None


def test_the_time_of_a_pause_is_one_row() -> None:
    """Who asks why it didn't run at three must find an answer."""
    planned = plan(rule("0 * * * *"), now=NOON, next_fire_at=None, base=NOON, paused_from=NOON - 5 * HOUR)
    (paused,) = planned.fires
    assert (paused.plan, paused.missed_from, paused.scheduled_for) == ("skipped_paused", NOON - 4 * HOUR, NOON)
    assert paused.missed_count == 5
    assert planned.next_fire_at == NOON + HOUR


def test_a_pause_without_instants_leaves_no_row() -> None:
    """Nothing was skipped."""
    planned = plan(rule("0 0 * * *"), now=NOON, next_fire_at=None, base=NOON, paused_from=NOON - HOUR)
    assert planned.fires == ()


def test_what_a_gap_swallows_is_written_down_when_it_is_to_be_skipped() -> None:
    """02:30 doesn't exist on 29 March 2026 in Vienna."""
    vienna = rule("30 2 * * *", timezone="Europe/Vienna", dst_gap="skip")
    before = datetime(2026, 3, 28, 1, 30, tzinfo=UTC)
    after = datetime(2026, 3, 30, 0, 30, tzinfo=UTC)
    assert plan(vienna, now=before, next_fire_at=before, base=before - HOUR).next_fire_at == after
    planned = plan(vienna, now=after, next_fire_at=after, base=before)
    assert told(planned.fires) == [("skipped_gap", datetime(2026, 3, 29, 1, tzinfo=UTC)), ("enqueue", after)]


def test_an_expression_that_is_refused_raises() -> None:
    """The scheduler lets that schedule stand still, and no other."""
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
    """However long nobody looked: each instant up to now is in one row, none in two, and rows stay few."""
    columns: dict[str, Any] = {
        "misfire": misfire,
        "overlap": overlap,
        "catch_up_limit": limit,
        "too_late_after": too_late,
    }
    each = rule("* * * * *", **columns) if by_cron else every(step * MINUTE, **columns)
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
