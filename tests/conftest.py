"""The fixtures of all tests: a server, a migrated database for each test, a connection, a server to be killed.

With pytest-xdist each worker has a server of its own: they start side by side while the run would wait for one just as
long, a worker that dies takes its server along, and nothing has to be agreed upon between them.
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
    """Take the shell's settings of rota and PostgreSQL away: no test touches a database that it wasn't given."""
    del config
    ours = ("ROTA_", "DATABASE_URL") if os.environ.get("TEST_DATABASE_URL") else ("ROTA_", "DATABASE_URL", "PG")
    for name in [name for name in os.environ if name.startswith(ours) and not name.startswith("ROTA_TEST_")]:
        del os.environ[name]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let three workers share two cores: half of the tests' time is waiting, for leases to end and clocks to move."""
    del config
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The PostgreSQL of this run."""
    with ExitStack() as life:
        try:
            found = life.enter_context(start_test_server())
        except NoServer as error:
            _give_up(str(error))
        yield found


@pytest.fixture(scope="session")
def databases(server: Server) -> Iterator[Databases]:
    """The migrated template: `.clone()` makes a database more, `.drop()` removes it."""
    with ExitStack() as life:
        try:
            made = life.enter_context(Databases(server))
        except NoServer as error:
            _give_up(str(error), asked_for=True)
        yield made


@pytest.fixture(scope="module")
def _clone(databases: Databases) -> Iterator[list[Database]]:
    held = [databases.clone()]
    yield held
    databases.drop(held[0])


@pytest.fixture
def database(databases: Databases, _clone: list[Database]) -> Iterator[Database]:
    """A migrated, empty database; what the test leaves in it, rows, objects and connections, is gone for the next."""
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
            _give_up(str(error))
        yield Path(folder)


@pytest.fixture(name="durable_server")
def make_durable_server(_durable_template: Path) -> Iterator[Callable[..., DurableServer]]:
    """Call it, with server settings if need be, for a server of its own, fsync on, to stop, kill and start again."""
    with ExitStack() as life:
        yield lambda **settings: life.enter_context(durable_server(_durable_template, **settings))


def _give_up(reasons: str, *, asked_for: bool = False) -> NoReturn:
    message = f"no PostgreSQL for the tests: {reasons}"
    if not (asked_for or os.environ.get("CI") or os.environ.get("REQUIRE_PG")):
        pytest.skip(message)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.fail(message, pytrace=False)  # a worker that exits takes its reasons with it
    pytest.exit(message, returncode=1)
