"""Fixtures for tests that run daemons inside the test process, on uvloop and, where starts and stops matter, on asyncio too."""

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

ON_BOTH_LOOPS = {"test_supervision.py", "test_drain.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loops on which a test runs: uvloop, and asyncio as well for the files in ON_BOTH_LOOPS."""
    del config
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in ON_BOTH_LOOPS:
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture(name="pool")
async def open_pool(database: Database) -> AsyncIterator[asyncpg.Pool[Record]]:
    """The connection pool that planners use."""
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=10) as pool:
        yield pool


@pytest.fixture(name="planner")
def make_planner(pool: asyncpg.Pool[Record]) -> Planner:
    """The scheduler of one node."""
    return Planner(pool)
