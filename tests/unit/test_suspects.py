"""Probation of suspects: jobs that were running when their node was lost."""

from __future__ import annotations

import random

import pytest

from rota.domain.job import FenceToken, Suspects
from rota.lifecycle.suspects import MAX_WIDTH, SHARED_SECONDS, Probation


def test_the_width_doubles_with_each_batch_and_falls_to_one_after_a_loss() -> None:
    """Forty harmless jobs finish in six batches."""
    probation, widths, token = Probation(), [], 0
    for _ in range(8):
        *_, (kind, count) = probation.requests(0)
        widths.append(count)
        for _ in range(count):
            token += 1
            probation.add(FenceToken(token), kind, 0)
        for each in range(token - count + 1, token + 1):
            probation.remove(FenceToken(each), lost=False)
    assert widths == [1, 2, 4, 8, 16, 32, 64, MAX_WIDTH]
    probation.add(FenceToken(0), Suspects.SHARED, 0)
    probation.remove(FenceToken(0), lost=True)
    assert probation.requests(0) == [(Suspects.ANY, 1)]


def test_suspects_that_must_run_alone_are_not_starved() -> None:
    """Shared suspects join a batch for a limited time only. When it has ended, a lone suspect is tried first."""
    probation = Probation()
    probation.width = 4
    assert [kind for kind, _ in probation.requests(0)] == [Suspects.ALONE, Suspects.SHARED]
    probation.add(FenceToken(1), Suspects.SHARED, 0)
    assert probation.requests(SHARED_SECONDS - 1) == [(Suspects.SHARED, 3)]
    assert probation.requests(SHARED_SECONDS) == []
    probation.remove(FenceToken(1), lost=False)
    probation.add(FenceToken(2), Suspects.ALONE, SHARED_SECONDS)
    assert probation.requests(SHARED_SECONDS) == []


@pytest.mark.parametrize("seed", range(20))
def test_only_jobs_that_kill_their_daemon_are_buried(seed: int) -> None:
    """A model of the claim and the reaper, with a new daemon after each death.

    Each killer costs at most two daemons.
    """
    chance = random.Random(seed)
    killers = set(range(chance.choice([0, 1, 3])))
    losses = dict.fromkeys(range(40), 2)
    lost_in_all = dict.fromkeys(losses, chance.choice([0, 2]))
    waiting, done, buried, deaths = set(losses), set[int](), set[int](), 0
    probation = Probation()
    while waiting:
        claimed: list[int] = []
        for kind, most in probation.requests(0):
            order = chance.sample(sorted(waiting), len(waiting))
            fits = {Suspects.ANY: (True, False), Suspects.ALONE: (False,), Suspects.SHARED: (True,)}[kind]
            claimed = [job for job in order if (lost_in_all[job] in {0, 2}) in fits][:most]
            if claimed:
                break
        for job in claimed:
            waiting.discard(job)
            losses[job] -= kind == Suspects.SHARED
            probation.add(FenceToken(job), kind, 0)
        if killers & set(claimed):
            deaths += 1
            probation = Probation()
            for job in claimed:
                losses[job] += 1
                lost_in_all[job] += 1
                (buried if losses[job] >= 3 else waiting).add(job)
        else:
            for job in claimed:
                probation.remove(FenceToken(job), lost=False)
                done.add(job)
    assert buried == killers
    assert done == set(losses) - killers
    assert deaths <= 2 * len(killers)
