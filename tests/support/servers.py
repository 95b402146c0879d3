"""Start a PostgreSQL server for the tests, and give each test a migrated, empty database."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from rota.embedded import EmbeddedPostgres
from rota.errors import DatabaseUnusable, NoPostgres
from waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

    from asyncpg import Connection, Record

T = TypeVar("T")

SMALL_SERVER_SETTINGS = {"max_connections": "200", "max_wal_size": "256MB", "min_wal_size": "32MB"}
MIN_FREE_MEMORY_BYTES = 1 << 30
MAX_REUSED_DATABASE_BYTES = 4 << 20


class NoServer(Exception):
    """There is no PostgreSQL for the tests. The message lists what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running PostgreSQL on which the tests may create databases."""

    dsn: str
    origin: str

    def dsn_for(self, database: str) -> str:
        """Return the DSN of another database on this server."""
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{database}"))


@contextmanager
def start_test_server() -> Iterator[Server]:
    """Yield the server of TEST_DATABASE_URL, else an embedded one in memory, else one in a container."""
    if dsn := os.environ.get("TEST_DATABASE_URL"):
        yield Server(dsn=dsn, origin="TEST_DATABASE_URL")
        return
    tried = ["TEST_DATABASE_URL is not set"]
    with tempfile.TemporaryDirectory(prefix="rota-tests-", dir=memory_folder()) as folder:
        try:
            postgres = embedded(Path(folder), sync=False).start()
        except (NoPostgres, DatabaseUnusable) as error:
            tried.append(f"embedded: {error}")
        else:
            with postgres:
                yield Server(dsn=postgres.dsn, origin=str(postgres.bin))
            return
    if not docker_answers():
        raise NoServer("; ".join([*tried, "testcontainers: no Docker answers"]))
    from testcontainers.community.postgres import PostgresContainer

    container = PostgresContainer("postgres:18", driver=None).with_command(
        "postgres -c fsync=off -c synchronous_commit=off -c full_page_writes=off "
        "-c rota.disposable=on -c max_connections=200"
    )
    with container as running:
        yield Server(dsn=running.get_connection_url(), origin="testcontainers")


def embedded(folder: Path, *, sync: bool, **settings: str) -> EmbeddedPostgres:
    """Return an embedded server below the folder, not yet started.

    Its binaries come from ROTA_TEST_PG_BIN or the default places.
    """
    folder.chmod(0o755)  # if the tests run as root, the server's user must be able to enter the temporary folder
    given = os.environ.get("ROTA_TEST_PG_BIN")
    bindir = Path(given) if given else None
    return EmbeddedPostgres(
        data=folder / "data", sync=sync, bindir=bindir, settings={**SMALL_SERVER_SETTINGS, **settings}
    )


def docker_answers() -> bool:
    """Return whether a Docker daemon answers. The `docker` program alone does not prove it."""
    docker: Any = import_module("docker")  # has no type annotations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaks its socket if there is no daemon
        try:
            with closing(docker.from_env(timeout=2)) as client:
                return bool(client.ping())
        except docker.errors.DockerException:
            return False
        finally:
            gc.collect()


def memory_folder() -> str | None:
    """Return a folder in memory with enough space for a server; None if there is none."""
    # In containers /dev/shm is often 64 MB, which is too small for a server.
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > MIN_FREE_MEMORY_BYTES:
        return str(shared)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A migrated database without jobs, schedules or history, used by one test at a time."""

    name: str
    dsn: str

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[Connection[Record]]:
        """Open another connection; it is closed at the end of the block in any state."""
        connection = await asyncpg.connect(self.dsn, **options)
        try:
            yield connection
        finally:
            connection.terminate()


@dataclass(slots=True)
class Databases:
    """The migrated template on a server, and its clones."""

    server: Server
    _runner: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=asyncio.new_event_loop))
    _prefix: str = f"rota_test_{os.getpid()}"
    _made: int = 0
    _pristine: str = ""
    _seeded: tuple[str, ...] = ()
    _emptied: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._run(self._make_template())
        except (OSError, asyncpg.PostgresError) as error:
            self._runner.close()
            raise NoServer(
                f"the server of {self.server.origin} can't be used: {type(error).__name__}: {error}"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._drop_template())
        finally:
            self._runner.close()

    def clone(self, of: Database | None = None) -> Database:
        """Create another database like the template, or like `of`, to which nothing may be connected."""
        self._made += 1
        name = f"{self._prefix}_{self._made}"
        self._run(self._on_server(f"create database {name} template {of.name if of else self._prefix}"))
        return Database(name=name, dsn=self.server.dsn_for(name))

    def drop(self, database: Database) -> None:
        """Drop a clone, even if sessions are connected to it."""
        self._run(self._on_server(f"drop database if exists {database.name} with (force)"))

    def emptied_or_replaced(self, database: Database) -> Database:
        """Empty this clone for the next test, or replace it if emptying is not enough.

        A clone is replaced if its schema, its settings or its migrated contents have changed, or if it has grown.
        Emptying keeps the sequences.
        """
        if self._run(self._empty(database)):
            return database
        self.drop(database)
        return self.clone()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _on_server(self, *statements: str) -> None:
        connection = await asyncpg.connect(self.server.dsn)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def _make_template(self) -> None:
        from rota.db.migrate import migrate

        template = self._prefix
        await self._on_server(f"create database {template}")
        await migrate(self.server.dsn_for(template))
        connection = await asyncpg.connect(self.server.dsn_for(template))
        try:
            tables = [row["name"] for row in await connection.fetch(SELECT_TABLES)]
            seeded = [
                name
                for name in tables
                if name != "rota.housekeeping"  # every daemon writes it, and needs no rows in it
                and await connection.fetchval(f"select exists (select from {name})")
            ]
            self._seeded, self._emptied = tuple(seeded), tuple(name for name in tables if name not in seeded)
            self._pristine = await self._fingerprint(connection)
        finally:
            await connection.close()
        # Forbid connections to the template: CREATE DATABASE fails while another session is connected to it.
        await self._on_server(f"alter database {template} with allow_connections false")

    async def _drop_template(self) -> None:
        await self._on_server(f"drop database if exists {self._prefix}")

    async def _empty(self, database: Database) -> bool:
        try:
            connection = await asyncpg.connect(database.dsn)
        except asyncpg.PostgresError:
            return False
        try:
            await connection.execute(TERMINATE_OTHER_SESSIONS)
            if (
                await self._fingerprint(connection) != self._pristine
                or await connection.fetchval(SELECT_SIZE) > MAX_REUSED_DATABASE_BYTES
            ):
                return False
            # Disable triggers, which would record the deletes as history.
            deletes = "; ".join(f"delete from {name}" for name in self._emptied)
            await connection.execute(f"set session_replication_role = replica; {deletes}")
        except asyncpg.PostgresError:  # no superuser, a lock that stays, or a database that refuses writes
            return False
        else:
            return True
        finally:
            connection.terminate()

    async def _fingerprint(self, connection: Connection[Record]) -> str:
        contents = " || ".join(
            f"coalesce((select string_agg(t::text, ',' order by t::text) from {name} as t), '')"
            for name in self._seeded
        )
        return str(await connection.fetchval(f"select md5(({SELECT_CATALOG}) || {contents or repr('')})"))


SELECT_TABLES = """
select format('%I.%I', n.nspname, c.relname) as name
from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = 'rota' and c.relkind in ('r', 'p') and not c.relispartition
order by c.oid
"""

TERMINATE_OTHER_SESSIONS = """
select pg_terminate_backend(pid, 5000)
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""

SELECT_SIZE = """
select coalesce(sum(pg_relation_size(c.oid)), 0)::int8
from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = 'rota' and c.relkind in ('r', 'i')
"""

# Every change of a catalog row changes its xmin. Updates of statistics are made in place and do not.
# PostgreSQL's own objects have OIDs below 16384.
SELECT_CATALOG = """
select string_agg(o.kind || o.id || '.' || o.xmin::text, ',' order by o.kind, o.id)
from (
    select 'relation' as kind, oid::text as id, xmin from pg_class where oid >= 16384
    union all select 'column', attrelid::text || '.' || attnum::text, xmin from pg_attribute where attrelid >= 16384
    union all select 'default', oid::text, xmin from pg_attrdef where oid >= 16384
    union all select 'constraint', oid::text, xmin from pg_constraint where oid >= 16384
    union all select 'trigger', oid::text, xmin from pg_trigger where oid >= 16384
    union all select 'function', oid::text, xmin from pg_proc where oid >= 16384
    union all select 'schema', oid::text, xmin from pg_namespace where oid >= 16384
    union all select 'setting', setrole::text, xmin from pg_db_role_setting
        where setdatabase = (select oid from pg_database where datname = current_database())
) as o
"""


@dataclass(slots=True, kw_only=True)
class DurableServer:
    """A durable server for one test, which may stop, kill and restart it.

    `.dsn` leads to a migrated, empty database.
    """

    postgres: EmbeddedPostgres

    @property
    def dsn(self) -> str:
        """Return the DSN of the migrated database. It stays the same after a restart."""
        return self.postgres.dsn_for("rota")

    def start(self) -> None:
        """Start the server and wait until it accepts connections, after recovery if it was killed."""
        self.postgres.start()

    def stop(self) -> None:
        """Shut the server down as an operator would: connections are closed, and committed data is kept."""
        self.postgres.stop()

    def restart(self) -> None:
        """Stop the server if it runs, and start it."""
        self.postgres.restart()

    def kill(self) -> None:
        """Kill the server with SIGKILL: it flushes nothing and notifies no client."""
        if (pid := self.postgres.pid) is not None:
            os.kill(pid, signal.SIGKILL)
            until(lambda: self.postgres.pid is None, what="the end of the killed server")


def make_durable_template(folder: Path) -> None:
    """Create a data folder with a migrated database `rota`, which durable servers copy."""
    from rota.db.migrate import migrate

    async def prepare(postgres: EmbeddedPostgres) -> None:
        connection = await asyncpg.connect(postgres.dsn)
        try:
            await connection.execute("create database rota")
        finally:
            await connection.close()
        await migrate(postgres.dsn_for("rota"))

    with embedded(folder, sync=False) as postgres, asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(prepare(postgres))


@contextmanager
def durable_server(template: Path, **settings: str) -> Iterator[DurableServer]:
    """Start a copy of the template with fsync on.

    In memory this suffices, because the tests kill processes and not the machine.
    """
    with tempfile.TemporaryDirectory(prefix="rota-durable-", dir=memory_folder()) as folder:
        subprocess.run(["cp", "-a", template / "data", folder], check=True)
        with embedded(Path(folder), sync=True, **settings) as postgres:
            yield DurableServer(postgres=postgres)


@contextmanager
def standby_of(primary: DurableServer) -> Iterator[DurableServer]:
    """Restart the primary beside a standby that receives nothing from it, so that all further writes are missing there."""
    with tempfile.TemporaryDirectory(prefix="rota-durable-", dir=memory_folder()) as folder:
        primary.stop()
        subprocess.run(["cp", "-a", primary.postgres.data, folder], check=True)
        primary.start()
        signal_file = Path(folder) / "data" / "standby.signal"
        signal_file.touch()
        owner = signal_file.parent.stat()
        os.chown(signal_file, owner.st_uid, owner.st_gid)
        with embedded(Path(folder), sync=True) as postgres:
            yield DurableServer(postgres=postgres)
