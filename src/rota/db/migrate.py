"""Migrate the schema `rota` to this version: forward only, one migrator at a time, each file in its own transaction.

A file that can't run in a transaction (`create index concurrently`) begins with the line `-- no transaction`. Its statements run
one by one, and the file is recorded as applied after the last one. A statement ends at a semicolon at the end of a line. If one
fails, the next run starts again with the first statement. So each must be repeatable: drop an index before creating it
(`drop index concurrently if exists`), because a failed build leaves an invalid index.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from rota.db.connecting import close_connection, open_connection
from rota.db.lock_waiting import LOCK_SECONDS, LockWaiter
from rota.db.pool import connect
from rota.db.server import is_pooled, require_utf8
from rota.db.sessions import ROUTE_OF_COMMANDS
from rota.db.sql import MIGRATIONS, ROLES, SQL
from rota.errors import DatabaseUnusable, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rota.db.connecting import Target
    from rota.db.pool import Connection

VERSION = len(MIGRATIONS)
BREAKING = "-- Breaks older daemons: "
"""Prefix of a line in a migration that removes something that the previous release uses. Additive migrations have none."""

OLDEST_COMPATIBLE = max(
    (number for number, text in enumerate(MIGRATIONS.values(), 1) if f"\n{BREAKING}" in text), default=1
)
"""The version of the last migration that breaks older daemons. Daemons of this version or later may work on the schema."""

NO_TRANSACTION = "-- no transaction\n"

LOCK_WAIT = "500ms"
"""How long a migration may wait for a lock at a time, because every claim queues behind it."""

ANSWER_SECONDS = 10.0
"""Limit for the first, short statements."""

SAFE_NAMES = "set local search_path = pg_catalog, pg_temp"
"""Runs first in each transaction, so that no function of another login runs with the migrator's rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of a migration: names of applied migrations, the schema's version, roles that got rights, the server's notices."""

    applied: Sequence[str]
    version: int
    roles: Sequence[str] = ()
    notices: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The installation's id, the schema's version, and the oldest version of a daemon that may work on it."""

    installation_id: str
    schema_version: int
    oldest_compatible: int


def checksum(text: str) -> str:
    """Return the checksum with which an applied migration is recorded."""
    return hashlib.sha256(text.encode()).hexdigest()


def script(version: int = 0) -> str:
    """Return the migrations after `version` as one SQL script, to be applied with another tool.

    On a database of another version, the script fails and changes nothing.
    """
    if version == VERSION:
        return f"-- The schema of rota is at version {VERSION}: nothing is missing.\n"
    begin = f"begin;\n{SAFE_NAMES};\n"
    contents = f"migrations {version + 1} to {VERSION}, for a database at version {version}"
    if not version:
        contents = "all migrations in order, for a database that has none of them yet"
    parts = [f"-- The schema of rota, {contents}.\n\n{begin}{_version_guard(version) if version else ''}"]
    for number, (name, text) in list(enumerate(MIGRATIONS.items(), 1))[version:]:
        row = SQL["record_migration"].replace("$1", str(number)).replace("$2", f"'{name}'")
        if statements_outside_transaction(text):
            session_names = SAFE_NAMES.replace("set local", "set")
            text = f"commit;\n\n{session_names};\n{text}\nreset search_path;\n{begin}"  # noqa: PLW2901
        parts.append(f"-- {name}\n\n{text}\n{row.replace('$3', repr(checksum(MIGRATIONS[name])))};\n")
    stamp = SQL["stamp_schema"].replace("$1", str(VERSION)).replace("$2", str(OLDEST_COMPATIBLE))
    parts.append(f"{stamp};\n\nselect made from rota.rotate_ledger();\n\ncommit;\n")
    return "\n".join(parts)


def _version_guard(version: int) -> str:
    return f"""do $$ begin
    if (select max(version) from rota.migrations) is distinct from {version} then
        raise exception 'these migrations are for version {version} of the schema, and it is at %',
            (select max(version) from rota.migrations)
            using hint = 'Run rota migrate --sql --from database on it.';
    end if;
end $$;
"""  # noqa: S608  a number


def roles_script(prefix: str) -> str:
    """Return the SQL script that grants the roles their rights."""
    if "'" in prefix or "\\" in prefix:
        raise ValueError(prefix)
    return f"begin;\n{SAFE_NAMES};\nset local rota.role_prefix = '{prefix}';\n\n{ROLES}\ncommit;\n"


async def migrate(
    target: Target, *, role_prefix: str | None = None, say: Callable[[str], None] | None = None
) -> Applied:
    """Apply the missing migrations. A second migrator waits for the first and then finds nothing to do.

    With a prefix, the four roles are created if they do not exist, and get their rights. After new migrations, roles that already
    have rights get the new ones in any case: otherwise a daemon would have no rights on a new table.

    `say` is called with a message when another session blocks the migration. Raises SchemaMismatch if an applied file has changed
    or the schema is too new for this rota; DatabaseUnusable if this login lacks rights, or another session holds a lock too long.
    """
    conn = await open_connection(target, statement_cache_size=0)
    notices: list[str] = []
    conn.add_log_listener(lambda _, notice: notices.append(". ".join(filter(None, (notice.message, notice.hint)))))
    try:
        encoding = await conn.fetchval("select pg_catalog.current_setting('server_encoding')", timeout=ANSWER_SECONDS)
        require_utf8(encoding)
        if is_pooled(conn, pid=await conn.fetchval("select pg_catalog.pg_backend_pid()", timeout=ANSWER_SECONDS)):
            raise DatabaseUnusable(
                "the database URL leads through a connection pooler, which loses the settings that migrations need: "
                "set ROTA_DIRECT_URL (or database.direct_url) to a URL straight to the server"
            )
        await conn.execute(SAFE_NAMES.replace("set local", "set"))
        waiter = LockWaiter(target, conn, say or (lambda _: None))
        applied = await _apply_missing(conn, waiter, role_prefix)
        await conn.execute("select made from rota.rotate_ledger()")
        prefixes = [role_prefix] if role_prefix is not None else []
        if applied:
            prefixes += [row[0] for row in await conn.fetch(SQL["find_role_prefixes"]) if row[0] != role_prefix]
        for prefix in prefixes:
            await waiter.run(partial(_grant, conn, prefix), what="giving the roles their rights")
        return Applied(
            applied=applied,
            version=len(await _read_applied(conn)),
            roles=[f"{prefix}_{role}" for prefix in prefixes for role in ("owner", "daemon", "operator", "client")],
            notices=notices,
        )
    except asyncpg.InsufficientPrivilegeError as error:
        denial, hint = str(error.args[0]), error.hint
    finally:
        await close_connection(conn)
    raise DatabaseUnusable(
        f"{denial}. "
        + (
            hint
            or "The login that migrates must own the schema rota or be a member of its owner; "
            "to create the schema, it needs CREATE on the database (grant create on database … to …)"
        )
    )


def statements_outside_transaction(text: str) -> list[str]:
    """Return the statements of a migration that can't run in a transaction, or an empty list for any other migration."""
    if not text.startswith(NO_TRANSACTION):
        return []
    pieces = re.split(r";[ \t]*\n", f"{text}\n")
    return [piece for piece in pieces if re.sub(r"--.*", "", piece).strip()]


async def _apply_missing(conn: asyncpg.Connection, waiter: LockWaiter, role_prefix: str | None) -> list[str]:
    """Apply the missing migrations and return their names. A row lock on a second connection keeps other migrators out."""
    applied: list[str] = []
    if not await _read_applied(conn):
        name, text = next(iter(MIGRATIONS.items()))
        try:
            await waiter.run(partial(_apply, conn, 1, name, text), what=f"migration {name}")
            applied.append(name)
        except (asyncpg.DuplicateSchemaError, asyncpg.UniqueViolationError):
            # Another migrator was faster: before the first migration there is no row to lock.
            if not await _read_applied(conn):
                raise
    async with waiter.only_migrator():
        known = await _read_applied(conn)
        _check_applied(known, await _oldest_compatible(conn, known))
        if role_prefix is not None and len(known) > VERSION:
            raise SchemaMismatch(
                f"the schema is at version {len(known)}, newer than this rota knows ({VERSION}): "
                "it would revoke rights on objects that it does not know; grant the rights with the newer rota"
            )
        for number, (name, text) in list(enumerate(MIGRATIONS.items(), 1))[len(known) :]:
            await waiter.run(partial(_apply, conn, number, name, text), what=f"migration {name}")
            applied.append(name)
    return applied


async def _apply(conn: asyncpg.Connection, number: int, name: str, text: str) -> None:
    statements = statements_outside_transaction(text)
    if statements:
        # No other session queues behind these. They wait for all open transactions, so they get a longer timeout.
        await conn.execute(f"set lock_timeout = '{LOCK_SECONDS:.0f}s'")
        for statement in statements:
            await conn.execute(statement)
    async with conn.transaction():
        await conn.execute(f"{SAFE_NAMES}; set local lock_timeout = '{LOCK_WAIT}'")
        if not statements:
            await conn.execute(text)
        await conn.execute(SQL["record_migration"], number, name, checksum(text))
        if number == VERSION:
            await conn.execute(SQL["stamp_schema"], VERSION, OLDEST_COMPATIBLE)


async def _grant(conn: asyncpg.Connection, prefix: str) -> None:
    async with conn.transaction():
        await conn.execute(f"{SAFE_NAMES}; set local lock_timeout = '{LOCK_WAIT}'")
        await conn.execute("select set_config('rota.role_prefix', $1, true)", prefix)
        await conn.execute(ROLES)


async def list_missing(target: Target) -> list[str]:
    """Return the names of the migrations that are not applied yet. Changes nothing; raises the same errors as `migrate`."""
    conn = await connect(target, route=ROUTE_OF_COMMANDS, name="rota migrate --check")
    try:
        known = await _read_applied(conn)
        _check_applied(known, await _oldest_compatible(conn, known))
    finally:
        await close_connection(conn)
    return list(MIGRATIONS)[len(known) :]


async def schema_version(dsn: str | None) -> int:
    """Return the schema's version. Raises the same errors as `migrate`."""
    return VERSION - len(await list_missing(dsn))


async def _read_applied(conn: asyncpg.Connection) -> list[tuple[int, str, str]]:
    if not await conn.fetchval("select to_regclass('rota.migrations') is not null"):
        return []
    return [(row["version"], row["name"], row["checksum"]) for row in await conn.fetch(SQL["list_migrations"])]


async def _oldest_compatible(conn: asyncpg.Connection, known: Sequence[object]) -> int:
    """Return the oldest version of a daemon that may work on a newer schema; 0 if the schema is not newer than this rota."""
    if len(known) <= VERSION:
        return 0
    return int(await conn.fetchval("select oldest_compatible from rota.meta"))


def _check_applied(known: Sequence[tuple[int, str, str]], oldest_compatible: int) -> None:
    # During an upgrade, old daemons still start, and run `rota migrate`, on the new schema.
    if len(known) > VERSION and oldest_compatible > VERSION:
        raise SchemaMismatch(
            f"the schema is at version {len(known)}, newer than this rota knows ({VERSION}): upgrade rota, don't migrate back"
        )
    for (version, applied_name, applied_checksum), (name, text) in zip(known, MIGRATIONS.items(), strict=False):
        if applied_name != name or applied_checksum != checksum(text):
            raise SchemaMismatch(
                f"migration {version} of this database is {applied_name}, whose content differs from {name} of this rota. "
                "Install the rota that made this schema, or delete the schema and all its jobs with "
                "`drop schema rota cascade` and run `rota migrate`"
            )


async def read_installation(conn: Connection) -> Installation:
    """Read the installation's id and version. Raises SchemaMismatch if this rota can't work on the schema."""
    if await conn.fetchval("select to_regclass('rota.meta')") is None:
        raise SchemaMismatch("this database has no schema rota yet: run `rota migrate`")
    row = await conn.fetchrow("select installation_id::text, schema_version, oldest_compatible from rota.meta")
    if row is None:
        raise SchemaMismatch("rota.meta is empty: the migration did not finish; run `rota migrate`")
    installation = Installation(**row)
    if installation.schema_version < VERSION:
        raise SchemaMismatch(
            f"the schema is at version {installation.schema_version}, this rota needs {VERSION}: run `rota migrate`"
        )
    if installation.oldest_compatible > VERSION:
        raise SchemaMismatch(
            f"the schema is at version {installation.schema_version} and works with rota of schema version "
            f"{installation.oldest_compatible} or later; this one has {VERSION}: upgrade rota"
        )
    return installation
