"""Fixtures for tests with real daemons: a database and the daemons that run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleets import Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from servers import Database, DurableServer


@pytest.fixture
async def fleet(database: Database, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A migrated, empty database on the run's server, with no daemon yet."""
    async with Fleet(database.dsn, tmp_path) as new_fleet:
        yield new_fleet


@pytest.fixture
def own_server(durable_server: Callable[..., DurableServer]) -> DurableServer:
    """A durable server that only this test uses, so that the test may stop and kill it."""
    return durable_server()


@pytest.fixture
async def restartable_fleet(own_server: DurableServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A migrated, empty database on `own_server`, with no daemon yet."""
    async with Fleet(own_server.dsn, tmp_path) as new_fleet:
        yield new_fleet
