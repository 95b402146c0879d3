"""Fixtures of all tests: a server, a migrated database for each test, a connection, and servers that a test may kill.

With pytest-xdist each worker has its own server, so the workers start in parallel and share no state.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from rota.errors import DatabaseUnusable, NoPostgres
from servers import (
    Database,
    Databases,
    DurableServer,
    NoServer,
    durable_server,
    make_durable_template,
    memory_folder,
    start_test_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from asyncpg import Connection, Record

    from servers import Server


def pytest_configure(config: pytest.Config) -> None:
    """Remove the shell's settings of rota and PostgreSQL, so that no test uses another database."""
    del config
    prefixes = ("ROTA_", "DATABASE_URL") if os.environ.get("TEST_DATABASE_URL") else ("ROTA_", "DATABASE_URL", "PG")
    for name in [name for name in os.environ if name.startswith(prefixes) and not name.startswith("ROTA_TEST_")]:
        del os.environ[name]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run three workers on two cores, because the tests spend half of their time waiting for leases and clocks."""
    del config
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The PostgreSQL server of this run."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(start_test_server())
        except NoServer as error:
            _skip_or_fail(str(error))
        yield found


@pytest.fixture(scope="session")
def databases(server: Server) -> Iterator[Databases]:
    """The migrated template: `.clone()` creates a database, `.drop()` removes it."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Databases(server))
        except NoServer as error:
            _skip_or_fail(str(error), required=True)
        yield made


@pytest.fixture(scope="module")
def _clone(databases: Databases) -> Iterator[list[Database]]:
    held = [databases.clone()]
    yield held
    databases.drop(held[0])


@pytest.fixture
def database(databases: Databases, _clone: list[Database]) -> Iterator[Database]:
    """A migrated, empty database. Rows, objects and connections that a test leaves in it are removed afterwards."""
    yield _clone[0]
    _clone[0] = databases.emptied_or_replaced(_clone[0])


@pytest.fixture
async def conn(database: Database) -> AsyncIterator[Connection[Record]]:
    """A connection to the test's database."""
    async with database.connect() as connection:
        yield connection


@pytest.fixture(scope="session")
def _durable_template() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rota-durable-", dir=memory_folder()) as folder:
        try:
            make_durable_template(Path(folder))
        except (NoPostgres, DatabaseUnusable) as error:
            _skip_or_fail(str(error))
        yield Path(folder)


@pytest.fixture(name="durable_server")
def make_durable_server(_durable_template: Path) -> Iterator[Callable[..., DurableServer]]:
    """Return a function that starts a server with fsync on and the given settings.

    The test may stop, kill and restart it.
    """
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(durable_server(_durable_template, **settings))


def _skip_or_fail(reasons: str, *, required: bool = False) -> NoReturn:
    message = f"no PostgreSQL for the tests: {reasons}"
    if not (required or os.environ.get("CI") or os.environ.get("REQUIRE_PG")):
        pytest.skip(message)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.fail(message, pytrace=False)  # pytest.exit in a worker would lose the message
    pytest.exit(message, returncode=1)
