"""Daemons run under uvloop in production, and under plain asyncio where there is none: what starts and ends is tried on both."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest
import uvloop

from schedule_rows import Planner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from asyncpg import Record

    from servers import Database

BOTH = {"test_supervision.py", "test_drain.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loops of a test by its file."""
    del config
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in BOTH:
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture(name="pool")
async def open_pool(database: Database) -> AsyncIterator[asyncpg.Pool[Record]]:
    """What planners run on."""
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=10) as pool:
        yield pool


@pytest.fixture(name="planner")
def make_planner(pool: asyncpg.Pool[Record]) -> Planner:
    """One node's scheduler."""
    return Planner(pool)
