"""The limit for the total size of large payloads in memory."""

from __future__ import annotations

import asyncio
import random

import pytest

from rota.handlers.byte_budget import ByteBudget


@pytest.mark.parametrize("seed", range(20))
async def test_the_limit_holds_in_any_order_of_reservations_and_cancellations(seed: int) -> None:
    """At the end of a random history the whole budget is free again."""
    dice, budget = random.Random(seed), ByteBudget(100)
    held = most = 0

    async def use(size: int) -> None:
        nonlocal held, most
        async with budget.reserve(size) as keep:
            mine = min(size, 100)
            held += mine
            most = max(most, held)
            try:
                await asyncio.sleep(0)
                needed = dice.randint(0, mine)
                keep(needed)
                held -= mine - needed
                mine = needed
                for _ in range(dice.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                held -= mine

    async with asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(200):
            tasks.append(group.create_task(use(dice.choice([1, 30, 60, 100, 500]))))
            if dice.random() < 0.3:
                dice.choice(tasks).cancel()
            await asyncio.sleep(0)
    assert held == 0
    assert 0 < most <= 100
    async with asyncio.timeout(5), budget.reserve(100):
        pass
