"""How many jobs a group claims ahead of its slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rota.lifecycle.slots import AHEAD_SECONDS, MAX_AHEAD, MAX_AHEAD_BYTES, MAX_UNWRITTEN, Slots


def run_batch(slots: Slots, count: int, *, seconds: float, payload: str = "{}") -> None:
    """Run `count` attempts, all of which end after `seconds`."""
    attempt: Any = SimpleNamespace(payload=payload)
    for _ in range(count):
        slots.take(attempt, 0.0)
    while slots.busy:
        following = slots.leave(seconds)
        if following is not None:
            slots.take(following, seconds)


def test_a_new_group_claims_as_many_jobs_as_it_has_slots() -> None:
    assert Slots(100).claimable == 100


def test_quick_batches_raise_the_number_of_jobs_ahead_to_its_maximum() -> None:
    slots = Slots(100)

    ahead = []
    for _ in range(6):
        run_batch(slots, slots.claimable, seconds=0.001)
        ahead.append(slots.ahead)

    assert ahead[0] == 100
    assert ahead == sorted(ahead)
    assert ahead[-1] == MAX_AHEAD


@pytest.mark.parametrize("seconds", [AHEAD_SECONDS / 2, AHEAD_SECONDS, 10])
def test_a_slow_batch_ends_claiming_ahead(seconds: float) -> None:
    slots = Slots(100, ahead=400)

    run_batch(slots, 100, seconds=seconds)

    assert slots.ahead == 0


def test_a_group_claims_ahead_what_it_can_run_in_half_of_ahead_seconds() -> None:
    slots = Slots(100, ahead=400)

    run_batch(slots, 100, seconds=0.01)

    assert slots.ahead == 150


def test_a_batch_smaller_than_the_slots_does_not_change_claiming_ahead() -> None:
    slots = Slots(100)

    run_batch(slots, 99, seconds=0.001)

    assert slots.ahead == 0


def test_a_group_with_one_slot_claims_the_next_job_only_after_the_outcome_is_written() -> None:
    slots = Slots(1)
    run_batch(slots, 1, seconds=0.001)

    slots.unwritten = 1

    assert slots.ahead == 0
    assert slots.claimable == 0


def test_large_payloads_bound_the_jobs_ahead() -> None:
    slots = Slots(100, ahead=MAX_AHEAD)

    run_batch(slots, 100, seconds=0.001, payload="x" * 30_000)

    assert slots.ahead * 30_000 <= MAX_AHEAD_BYTES


def test_jobs_beyond_the_slots_wait_and_start_in_order() -> None:
    slots = Slots(2, ahead=2)
    attempts: list[Any] = [SimpleNamespace(payload="{}") for _ in range(4)]

    started = [slots.take(attempt, 0.0) for attempt in attempts]

    assert started == [True, True, False, False]
    assert [slots.leave(0.0), slots.leave(0.0)] == attempts[2:]


def test_too_many_unwritten_outcomes_stop_the_claims() -> None:
    assert Slots(100, unwritten=MAX_UNWRITTEN + 100).claimable == 0


def test_jobs_given_back_end_claiming_ahead() -> None:
    slots = Slots(1, ahead=5)
    attempts: list[Any] = [SimpleNamespace(payload="{}") for _ in range(3)]
    for attempt in attempts:
        slots.take(attempt, 0.0)

    assert slots.give_up_waiting() == attempts[1:]

    assert (slots.ahead, len(slots.waiting)) == (0, 0)
