"""The scene of a test with real daemons: a database, the daemons on it, and the eyes to see what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scenes import Scene

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from servers import Database, DurableServer


@pytest.fixture
async def scene(database: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    """A migrated, empty database on the run's server, with no daemon yet."""
    async with Scene(database.dsn, tmp_path) as made:
        yield made


@pytest.fixture
def own_server(durable_server: Callable[..., DurableServer]) -> DurableServer:
    """A durable server of this test's own, to be stopped and killed."""
    return durable_server()


@pytest.fixture
async def fragile_scene(own_server: DurableServer, tmp_path: Path) -> AsyncIterator[Scene]:
    """The same on `own_server`."""
    async with Scene(own_server.dsn, tmp_path) as made:
        yield made
