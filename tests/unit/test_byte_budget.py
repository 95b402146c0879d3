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
    reserved_bytes = max_reserved_bytes = 0

    async def use(size: int) -> None:
        nonlocal reserved_bytes, max_reserved_bytes
        async with budget.reserve(size) as keep:
            own_bytes = min(size, 100)
            reserved_bytes += own_bytes
            max_reserved_bytes = max(max_reserved_bytes, reserved_bytes)
            try:
                await asyncio.sleep(0)
                needed = dice.randint(0, own_bytes)
                keep(needed)
                reserved_bytes -= own_bytes - needed
                own_bytes = needed
                for _ in range(dice.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                reserved_bytes -= own_bytes

    async with asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(200):
            tasks.append(group.create_task(use(dice.choice([1, 30, 60, 100, 500]))))
            if dice.random() < 0.3:
                dice.choice(tasks).cancel()
            await asyncio.sleep(0)
    assert reserved_bytes == 0
    assert 0 < max_reserved_bytes <= 100
    async with asyncio.timeout(5), budget.reserve(100):
        pass
