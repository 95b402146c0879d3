"""Where the tests' PostgreSQL comes from, and how a test gets a migrated, empty database on it."""

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

QUICK = {"max_connections": "200", "max_wal_size": "256MB", "min_wal_size": "32MB"}
ROOMY = 1 << 30
BLOATED = 4 << 20


class NoServer(Exception):
    """No PostgreSQL for the tests; the message says what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running PostgreSQL on which the tests may create databases."""

    dsn: str
    origin: str

    def dsn_for(self, database: str) -> str:
        """How to connect to another of its databases."""
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{database}"))


@contextmanager
def some_server() -> Iterator[Server]:
    """The first of: the server of TEST_DATABASE_URL, an embedded one in memory, one in a container."""
    if dsn := os.environ.get("TEST_DATABASE_URL"):
        yield Server(dsn=dsn, origin="TEST_DATABASE_URL")
        return
    tried = ["TEST_DATABASE_URL is not set"]
    with tempfile.TemporaryDirectory(prefix="rota-tests-", dir=memory()) as folder:
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
    """A server of our own below that folder, from the binaries that ROTA_TEST_PG_BIN or else the usual places name."""
    folder.chmod(0o755)  # a temporary folder of ours: where we are root, the server's user has to pass
    asked = os.environ.get("ROTA_TEST_PG_BIN")
    bindir = Path(asked) if asked else None
    return EmbeddedPostgres(data=folder / "data", sync=sync, bindir=bindir, settings={**QUICK, **settings})


def docker_answers() -> bool:
    """Whether a Docker daemon can be spoken to; a `docker` on PATH proves nothing."""
    docker: Any = import_module("docker")  # ships no types
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a client that finds no daemon leaks its socket
        try:
            with closing(docker.from_env(timeout=2)) as client:
                return bool(client.ping())
        except docker.errors.DockerException:
            return False
        finally:
            gc.collect()


def memory() -> str | None:
    """A folder in memory for data folders, if there is a roomy one; None: the usual place for temporary files."""
    # Containers often have a /dev/shm of 64 MB, on which a server would run out of space in the middle of a test.
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > ROOMY:
        return str(shared)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A migrated database without jobs, schedules or history, for the one test that holds it."""

    name: str
    dsn: str

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[Connection[Record]]:
        """Open one more connection to it, closed at the end whatever state it is in."""
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
        """Make one more database like the template, or like one to which nobody is connected."""
        self._made += 1
        name = f"{self._prefix}_{self._made}"
        self._run(self._on_server(f"create database {name} template {of.name if of else self._prefix}"))
        return Database(name=name, dsn=self.server.dsn_for(name))

    def drop(self, database: Database) -> None:
        """Remove a clone, whoever is still connected to it."""
        self._run(self._on_server(f"drop database if exists {database.name} with (force)"))

    def renewed(self, database: Database) -> Database:
        """Give back an equal of the template: this clone emptied where that is enough, else a new one.

        Emptying keeps sequences where they are. A clone that has another schema, other settings or other contents in
        a table that the migrations fill, or that has grown, is replaced: no test has to say that it did such a thing.
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
            tables = [row["name"] for row in await connection.fetch(TABLES)]
            seeded = [
                name
                for name in tables
                if name != "rota.housekeeping"  # every daemon writes it, and does without its rows
                and await connection.fetchval(f"select exists (select from {name})")
            ]
            self._seeded, self._emptied = tuple(seeded), tuple(name for name in tables if name not in seeded)
            self._pristine = await self._fingerprint(connection)
        finally:
            await connection.close()
        # Nobody may connect to a template: CREATE DATABASE would wait for autovacuum, or fail for a person.
        await self._on_server(f"alter database {template} with allow_connections false")

    async def _drop_template(self) -> None:
        await self._on_server(f"drop database if exists {self._prefix}")

    async def _empty(self, database: Database) -> bool:
        try:
            connection = await asyncpg.connect(database.dsn)
        except asyncpg.PostgresError:
            return False
        try:
            await connection.execute(OTHERS_OUT)
            if await self._fingerprint(connection) != self._pristine or await connection.fetchval(SIZE) > BLOATED:
                return False
            # Without triggers: what a DELETE records is history to a user, and litter here.
            deletes = "; ".join(f"delete from {name}" for name in self._emptied)
            await connection.execute(f"set session_replication_role = replica; {deletes}")
        except asyncpg.PostgresError:  # not a superuser; a lock that doesn't go away; a database that refuses writes
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
        return str(await connection.fetchval(f"select md5(({SCHEMA}) || {contents or repr('')})"))


TABLES = """
select format('%I.%I', n.nspname, c.relname) as name
from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = 'rota' and c.relkind in ('r', 'p') and not c.relispartition
order by c.oid
"""

OTHERS_OUT = """
select pg_terminate_backend(pid, 5000)
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""

SIZE = """
select coalesce(sum(pg_relation_size(c.oid)), 0)::int8
from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = 'rota' and c.relkind in ('r', 'i')
"""

# Every change of a catalogue's row gives it another xmin; statistics are changed in place and don't.
# Rows from 16384 on are not PostgreSQL's own.
SCHEMA = """
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
    """A durable server of the test's own, to be stopped, killed and started again. `.dsn`: migrated, empty."""

    postgres: EmbeddedPostgres

    @property
    def dsn(self) -> str:
        """How to connect to its migrated database. Stays the same over restarts."""
        return self.postgres.dsn_for("rota")

    def start(self) -> None:
        """Return once it takes connections, after recovery if it was killed."""
        self.postgres.start()

    def stop(self) -> None:
        """Shut it down as an operator would: connections are cut, what is committed is kept."""
        self.postgres.stop()

    def restart(self) -> None:
        """Stop it, if it runs, and start it."""
        self.postgres.restart()

    def kill(self) -> None:
        """End it as the kernel would when memory runs out: nothing is flushed, nobody is told."""
        if (pid := self.postgres.pid) is not None:
            os.kill(pid, signal.SIGKILL)
            until(lambda: self.postgres.pid is None, what="the end of the killed server")


def make_durable_template(folder: Path) -> None:
    """Make, below that folder, a data folder with a migrated database `rota`, from which servers are copied."""
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
    """Start a copy of the template, fsync on. In memory all the same: what kill -9 spares it spares there, too."""
    with tempfile.TemporaryDirectory(prefix="rota-durable-", dir=memory()) as folder:
        subprocess.run(["cp", "-a", template / "data", folder], check=True)
        with embedded(Path(folder), sync=True, **settings) as postgres:
            yield DurableServer(postgres=postgres)


@contextmanager
def standby_of(primary: DurableServer) -> Iterator[DurableServer]:
    """Restart the primary beside a standby that receives nothing from it: what is written from now on, it will have lost."""
    with tempfile.TemporaryDirectory(prefix="rota-durable-", dir=memory()) as folder:
        primary.stop()
        subprocess.run(["cp", "-a", primary.postgres.data, folder], check=True)
        primary.start()
        signal_file = Path(folder) / "data" / "standby.signal"
        signal_file.touch()
        owner = signal_file.parent.stat()
        os.chown(signal_file, owner.st_uid, owner.st_gid)
        with embedded(Path(folder), sync=True) as postgres:
            yield DurableServer(postgres=postgres)
