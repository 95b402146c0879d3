"""A database migrated by a login without superuser rights, with rota's four roles and a login for each."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from asyncpg import Connection, Record

    from servers import Server

ROLES = ("owner", "daemon", "operator", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDatabase:
    """A database with roles. Logins: `<prefix>_app` and `<prefix>_other` (clients), `<prefix>_op`, `<prefix>_node`."""

    server: Server
    database: str
    prefix: str

    @property
    def root(self) -> str:
        """Return the DSN of the superuser."""
        return self.server.dsn_for(self.database)

    @property
    def migrator(self) -> str:
        """Return the name of the login that migrates. It has only CREATEROLE and CREATE on the database."""
        return f"{self.prefix}_mig"

    def dsn(self, login: str) -> str:
        """Return the DSN of a login."""
        return dsn_for_login(self.root, f"{self.prefix}_{login}")

    @asynccontextmanager
    async def connect(self, login: str | None = None) -> AsyncIterator[Connection[Record]]:
        """Connect as that login, or as the superuser."""
        connection = await asyncpg.connect(self.dsn(login) if login else self.root)
        try:
            yield connection
        finally:
            connection.terminate()


def dsn_for_login(dsn: str, login: str) -> str:
    """Return the DSN for another login, whose password is `secret`."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{login}:secret@{parts.netloc.rpartition('@')[2]}"))


@asynccontextmanager
async def role_database(server: Server, name: str, *, migrate: bool = True) -> AsyncIterator[RoleDatabase]:
    """Create a database with roles for the block, and drop both afterwards."""
    roles = RoleDatabase(server=server, database=f"rota_world_{os.getpid()}_{name}", prefix=f"rt{os.getpid()}_{name}")
    await _make(roles, migrate=migrate)
    try:
        yield roles
    finally:
        await _remove(roles)


@contextmanager
def module_role_database(server: Server, name: str) -> Iterator[RoleDatabase]:
    """Create one for a whole test module, outside of any event loop of a test."""
    life = role_database(server, name)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        roles = runner.run(life.__aenter__())
        try:
            yield roles
        finally:
            runner.run(life.__aexit__(None, None, None))


async def _make(roles: RoleDatabase, *, migrate: bool) -> None:
    from rota.db.migrate import migrate as bring_up_to_date

    root = await asyncpg.connect(roles.server.dsn)
    try:
        await root.execute(f"create role {roles.migrator} login createrole password 'secret'")
        await root.execute(f"create database {roles.database}")
        await root.execute(f"grant create on database {roles.database} to {roles.migrator}")
        if not migrate:
            return
        await bring_up_to_date(roles.dsn("mig"), role_prefix=roles.prefix)
        for login, role in (("app", "client"), ("other", "client"), ("op", "operator"), ("node", "daemon")):
            await root.execute(f"create role {roles.prefix}_{login} login password 'secret'")
            await root.execute(f"grant {roles.prefix}_{role} to {roles.prefix}_{login}")
    finally:
        await root.close()


async def _remove(roles: RoleDatabase) -> None:
    root = await asyncpg.connect(roles.server.dsn)
    try:
        await root.execute(f"drop database {roles.database} with (force)")
        rows = await root.fetch("select rolname from pg_roles where starts_with(rolname, $1)", f"{roles.prefix}_")
        for row in rows:
            await root.execute(f"drop owned by {row[0]}")
        for row in rows:
            await root.execute(f"drop role {row[0]}")
    finally:
        await root.close()
