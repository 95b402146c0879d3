"""Bring the schema `rota` to this version: forward only, one migrator at a time, each file in its own transaction."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg

from rota.db.sql import MIGRATIONS, SQL
from rota.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.pool import Connection

LOCK = 1919906913
"""First key of all our advisory locks ("rota" in ASCII); the second: 1 waiting dispatchers, 2 ledger, 3 migrations, 4 tokens."""

VERSION = len(MIGRATIONS)
OLDEST_COMPATIBLE = VERSION
"""The oldest version of the schema's users that may run beside this one. Raised only when a column or function goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a migration run did: the versions applied, and the version the schema has now."""

    applied: Sequence[str]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What the database says of itself: its identity, its version, and which daemons may work on it."""

    installation_id: str
    schema_version: int
    oldest_compatible: int


def checksum(text: str) -> str:
    """Return the fingerprint by which an applied migration is known."""
    return hashlib.sha256(text.encode()).hexdigest()


def script() -> str:
    """Return all migrations as one SQL text, for people who bring the schema in with a tool of their own."""
    parts = ["-- The schema of rota, all migrations in order, for a database that has none of them yet.\n\nbegin;\n"]
    for number, (name, text) in enumerate(MIGRATIONS.items(), 1):
        row = SQL["record_migration"].replace("$1", str(number)).replace("$2", f"'{name}'")
        parts.append(f"-- {name}\n\n{text}\n{row.replace('$3', repr(checksum(text)))};\n")
    stamp = SQL["stamp_schema"].replace("$1", str(VERSION)).replace("$2", str(OLDEST_COMPATIBLE))
    parts.append(f"{stamp};\n\nselect made from rota.rotate_ledger();\n\ncommit;\n")
    return "\n".join(parts)


async def migrate(dsn: str | None) -> Applied:
    """Apply what is missing. A second migrator waits for the first and then finds nothing to do.

    Raises SchemaMismatch when an applied file has changed since, or when the schema is newer than this rota.
    """
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute("select pg_advisory_lock($1, 3)", LOCK)
        made = await conn.fetchval("select to_regclass('rota.migrations') is not null")
        known = await conn.fetch(SQL["list_migrations"]) if made else []
        _agree([(row["version"], row["name"], row["checksum"]) for row in known])
        fresh = list(MIGRATIONS.items())[len(known) :]
        for number, (name, text) in enumerate(fresh, len(known) + 1):
            async with conn.transaction():
                await conn.execute(text)
                await conn.execute(SQL["record_migration"], number, name, checksum(text))
                if number == VERSION:
                    await conn.execute(SQL["stamp_schema"], VERSION, OLDEST_COMPATIBLE)
        await conn.execute("select made from rota.rotate_ledger()")
        return Applied(applied=[name for name, _ in fresh], version=VERSION)
    finally:
        await conn.close()


async def missing(dsn: str | None) -> list[str]:
    """Return the migrations that the database hasn't seen, without changing anything. Raises what `migrate` would."""
    conn = await asyncpg.connect(dsn)
    try:
        made = await conn.fetchval("select to_regclass('rota.migrations') is not null")
        known = await conn.fetch(SQL["list_migrations"]) if made else []
    finally:
        await conn.close()
    _agree([(row["version"], row["name"], row["checksum"]) for row in known])
    return list(MIGRATIONS)[len(known) :]


def _agree(known: Sequence[tuple[int, str, str]]) -> None:
    if len(known) > VERSION:
        raise SchemaMismatch(
            f"the schema is at version {len(known)}, newer than this rota knows ({VERSION}): upgrade rota, don't migrate back"
        )
    for (version, name, was), (ours, text) in zip(known, MIGRATIONS.items(), strict=False):
        if name != ours or was != checksum(text):
            raise SchemaMismatch(
                f"migration {version} was applied as {name} with another content than {ours} has here: "
                "applied files must not change; install the rota that made this schema, or restore the file"
            )


async def installation(conn: Connection) -> Installation:
    """Read who this database says it is; raise SchemaMismatch, saying what to do, where this rota can't work on it."""
    if await conn.fetchval("select to_regclass('rota.meta')") is None:
        raise SchemaMismatch("this database has no schema rota yet: run `rota migrate`")
    row = await conn.fetchrow("select installation_id::text, schema_version, oldest_compatible from rota.meta")
    if row is None:
        raise SchemaMismatch("rota.meta is empty: the migration did not finish; run `rota migrate`")
    found = Installation(**row)
    if found.schema_version < VERSION:
        raise SchemaMismatch(
            f"the schema is at version {found.schema_version}, this rota needs {VERSION}: run `rota migrate`"
        )
    if found.oldest_compatible > VERSION:
        raise SchemaMismatch(
            f"the schema is at version {found.schema_version} and works with rota of schema version "
            f"{found.oldest_compatible} or later; this one has {VERSION}: upgrade rota"
        )
    return found
