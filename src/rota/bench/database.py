"""The server to measure, a temporary database on it, and its counters."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from rota.bench.processor import server_cpu_seconds
from rota.config import load, mask_dsn
from rota.db.connecting import close_connection, open_connection
from rota.db.migrate import migrate
from rota.embedded import EmbeddedPostgres
from rota.errors import ConfigError, DatabaseUnusable, NoDatabase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

STATISTICS_SECONDS = 1.5
"""After this time, the statistics views contain the counters of an idle backend."""

JOBS_PER_INSERT = 1000

COUNTERS = """
select pg_current_wal_insert_lsn() - '0/0'::pg_lsn as wal_bytes, xact_commit as commits, blks_hit + blks_read as buffers
from pg_stat_database where datname = current_database()
"""
STATEMENTS = """
select coalesce(sum(calls), 0)::int8 from pg_stat_statements
where dbid = (select oid from pg_database where datname = current_database())
"""
INSERT = """
insert into rota.jobs (handler) select $1 from generate_series(1, $2::int4)
"""
SERVER = """
select current_setting('server_version') as version, current_setting('fsync') as fsync,
    current_setting('synchronous_commit') as synchronous_commit, current_setting('shared_buffers') as shared_buffers,
    current_setting('jit') as jit
"""


@contextmanager
def server_to_measure(dsn: str | None, *, embedded: bool) -> Iterator[str]:
    """Yield the URL of the server to measure: the given or configured one, or a temporary one with `embedded`."""
    if embedded:
        if dsn is not None:
            raise ConfigError("--dsn and --embedded can't be combined. Choose one")
        with tempfile.TemporaryDirectory(prefix="rota-bench-", ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o755)  # the server runs as another user if this process runs as root
            settings = {
                "shared_preload_libraries": "pg_stat_statements",
                "max_wal_size": "4GB",
                "max_connections": "400",  # for the idle daemons of `growth`
            }
            with EmbeddedPostgres(data=Path(folder) / "data", settings=settings) as postgres:
                yield postgres.dsn
        return
    try:
        found = load(overrides={"database.url": dsn}).require_direct_database()
    except NoDatabase as error:
        raise NoDatabase(
            "no server to measure is configured. Set DATABASE_URL or pass --dsn, and the bench creates and drops its own database "
            "there; or pass --embedded for a temporary server"
        ) from error
    yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties that must be equal before two results may be compared."""

    cores: int
    postgresql: str
    fsync: str
    synchronous_commit: str
    shared_buffers: str
    jit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The server's counters. `statements` is None without pg_stat_statements."""

    wal_bytes: int
    commits: int
    buffers: int
    statements: int | None

    def sent_since(self, before: Counters) -> int:
        """Return the number of statements since `before`. Without pg_stat_statements, return that of transactions."""
        if self.statements is None or before.statements is None:
            return self.commits - before.commits
        return self.statements - before.statements


class BenchDatabase:
    """A migrated database for one measurement."""

    def __init__(self, dsn: str, connection: asyncpg.Connection, *, counts_statements: bool) -> None:
        self.dsn = dsn
        self.connection = connection
        self.own_statements = 0
        """Calls of fetch_value() since the last read_counters()."""
        self._counts_statements = counts_statements

    async def fetch_value(self, sql: str, *arguments: object) -> object:
        """Return the single value of a query, and count the query as the bench's own."""
        self.own_statements += 1
        return await self.connection.fetchval(sql, *arguments)

    async def insert_jobs(self, handler: str, jobs: int) -> None:
        """Insert due jobs in many statements, so that their `run_at` differs."""
        for done in range(0, jobs, JOBS_PER_INSERT):
            await self.connection.execute(INSERT, handler, min(JOBS_PER_INSERT, jobs - done))

    async def vacuum(self) -> None:
        """Vacuum and analyze. Call this before the jobs are inserted: a real backlog also grows after the last analyze."""
        await self.connection.execute("vacuum (analyze) rota.jobs")
        await self.connection.execute("analyze rota.job_runs")

    async def read_counters(self, *, wait_for_flush: bool) -> Counters:
        """Read the counters. With `wait_for_flush`, first wait until all sessions have flushed their statistics."""
        if wait_for_flush:
            await asyncio.sleep(STATISTICS_SECONDS)
        self.own_statements = 0
        row = await self.connection.fetchrow(COUNTERS)
        statements = await self.connection.fetchval(STATEMENTS) if self._counts_statements else None
        assert row is not None  # noqa: S101  one row of a view about this database
        return Counters(
            wal_bytes=int(row["wal_bytes"]), commits=row["commits"], buffers=row["buffers"], statements=statements
        )

    async def server_cpu_seconds(self) -> float:
        """Return the processor time of the whole server so far in seconds, or 0 if the server is not on this machine."""
        backend = int(str(await self.fetch_value("select pg_backend_pid()")))
        return server_cpu_seconds(backend)

    async def count_dead_tuples(self) -> int:
        """Return the number of dead rows in rota.jobs."""
        found = await self.connection.fetchval(
            "select coalesce(n_dead_tup, 0) from pg_stat_user_tables where relid = 'rota.jobs'::regclass"
        )
        return int(found or 0)

    async def describe_machine(self) -> Machine:
        """Return the number of cores and the server's settings."""
        row = await self.connection.fetchrow(SERVER)
        assert row is not None  # noqa: S101  one row of settings
        return Machine(
            cores=cores(),
            postgresql=row["version"].split()[0],
            fsync=row["fsync"],
            synchronous_commit=row["synchronous_commit"],
            shared_buffers=row["shared_buffers"],
            jit=row["jit"],
        )


@asynccontextmanager
async def temporary_database(server: str) -> AsyncIterator[BenchDatabase]:
    """Create and migrate a database. Drop it at the end, even if sessions are connected."""
    name = f"rota_bench_{os.getpid()}"
    dsn = with_database_name(server, name)
    try:
        maintenance = await open_connection(server)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        raise DatabaseUnusable(f"no database answers at {mask_dsn(server)}: {error or type(error).__name__}") from error
    try:
        try:
            await maintenance.execute(f"create database {name}")
        except asyncpg.InsufficientPrivilegeError as error:
            raise DatabaseUnusable(
                f"this login may not create a database at {mask_dsn(server)}. Run: alter role … createdb"
            ) from error
        try:
            await migrate(dsn)
            db = await open_connection(dsn)
            try:
                yield BenchDatabase(dsn, db, counts_statements=await _can_count_statements(db))
            finally:
                with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    await db.close(timeout=5)
        finally:
            await maintenance.execute(f"drop database {name} with (force)")
    finally:
        await close_connection(maintenance)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_database_name(dsn: str, name: str) -> str:
    """Return the URL with another database name."""
    return re.sub(r"^(postgres(?:ql)?://[^/?]*)(?:/[^?]*)?", rf"\1/{name}", dsn, count=1)


async def _can_count_statements(db: asyncpg.Connection) -> bool:
    try:
        await db.execute("create extension if not exists pg_stat_statements")
        await db.fetchval(STATEMENTS)
    except asyncpg.PostgresError:
        return False
    return True
