"""Bring the schema `rota` to this version: forward only, one migrator at a time, each file in its own transaction.

A file that can't run in one (`create index concurrently`) begins with the line `-- no transaction`. Its statements, none of
which holds a semicolon at the end of another line than its last, run one by one, and it is recorded after them. Where one fails,
or the connection goes, the next run begins with the first of them again: so each must be fit to be run twice, and an index must be
dropped before it is made (`drop index concurrently if exists`), because what is left of a build that failed is an invalid index.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from rota.db.pool import is_pooled, refuse_encoding
from rota.db.sql import MIGRATIONS, ROLES, SQL
from rota.errors import DatabaseUnusable, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rota.db.pool import Connection

LOCK = 1919906913
"""First key of all our advisory locks ("rota" in ASCII); the second: 1 waiting dispatchers, 2 ledger, 3 migrations, 4 tokens."""

VERSION = len(MIGRATIONS)
BREAKING = "-- Breaks older daemons: "
"""How a line of a migration begins that takes away what the release before it still uses. Additive ones have none."""

OLDEST_COMPATIBLE = max((n for n, text in enumerate(MIGRATIONS.values(), 1) if f"\n{BREAKING}" in text), default=1)
"""The oldest version of the schema's users that may run beside this one: that of the last migration which breaks older ones."""

NO_TRANSACTION = "-- no transaction\n"

LOCK_WAIT = "500ms"
"""How long a migration may wait for a lock at a time: behind one that waits, every claim waits, too."""

PAUSE = 1.0
"""Seconds for everybody else between two tries at a lock."""

PATIENCE = 60.0
"""Seconds after which a lock is given up: somebody holds it and won't let go."""

TURN = 0.2
"""Seconds until a migrator looks again whether another one is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a migration run did: the versions applied, the version the schema has now, whose rights were set, what was said."""

    applied: Sequence[str]
    version: int
    roles: Sequence[str] = ()
    notices: Sequence[str] = ()


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
        if apart(text):
            text = f"commit;\n\n{text}\nbegin;\n"  # noqa: PLW2901
        parts.append(f"-- {name}\n\n{text}\n{row.replace('$3', repr(checksum(MIGRATIONS[name])))};\n")
    stamp = SQL["stamp_schema"].replace("$1", str(VERSION)).replace("$2", str(OLDEST_COMPATIBLE))
    parts.append(f"{stamp};\n\nselect made from rota.rotate_ledger();\n\ncommit;\n")
    return "\n".join(parts)


def roles_script(prefix: str) -> str:
    """Return what gives the roles their rights as one SQL text."""
    if "'" in prefix or "\\" in prefix:
        raise ValueError(prefix)
    return f"begin;\nset local rota.role_prefix = '{prefix}';\n\n{ROLES}\ncommit;\n"


async def migrate(dsn: str | None, *, role_prefix: str | None = None) -> Applied:
    """Apply what is missing. A second migrator waits for the first and then finds nothing to do.

    With a prefix the four roles are made, where they don't exist, and get their rights. After new migrations those that have
    rights here get them anew in any case: a daemon without rights on a new table would stand still.

    Raises SchemaMismatch when an applied file has changed since, or when the schema is newer and not for this rota any more;
    DatabaseUnusable when this user may not, or when somebody doesn't let go of a lock.
    """
    conn = await asyncpg.connect(dsn, statement_cache_size=0)
    notices: list[str] = []
    conn.add_log_listener(lambda _, said: notices.append(". ".join(filter(None, (said.message, said.hint)))))
    try:
        refuse_encoding(await conn.fetchval("show server_encoding"))
        if is_pooled(conn, pid=await conn.fetchval("select pg_backend_pid()")):
            # The lock would stay behind in a server connection of the pooler's, and keep every later migrator waiting.
            raise DatabaseUnusable(
                "the database URL leads through a connection pooler, where a migration can't keep others from running beside it: "
                "set ROTA_DIRECT_URL (or database.direct_url) to a URL straight to the server"
            )
        # Not by waiting for it: a statement that waits holds a snapshot, for whose end an index built concurrently waits.
        while not await conn.fetchval("select pg_try_advisory_lock($1, 3)", LOCK):  # noqa: ASYNC110  another process's event
            await asyncio.sleep(TURN)
        known = await _known(conn)
        _agree(known, await _oldest_compatible(conn, known))
        if role_prefix is not None and len(known) > VERSION:
            raise SchemaMismatch(
                f"the schema is at version {len(known)}, newer than this rota knows ({VERSION}): "
                "it would take away the rights on what it doesn't know; give rights with the newer rota"
            )
        fresh = list(MIGRATIONS.items())[len(known) :]
        for number, (name, text) in enumerate(fresh, len(known) + 1):
            await _patiently(partial(_apply, conn, number, name, text), what=f"migration {name}")
        await conn.execute("select made from rota.rotate_ledger()")
        prefixes = [role_prefix] if role_prefix is not None else []
        if fresh:
            prefixes += [row[0] for row in await conn.fetch(SQL["find_role_prefixes"]) if row[0] != role_prefix]
        for prefix in prefixes:
            await _patiently(partial(_grant, conn, prefix), what="giving the roles their rights")
        return Applied(
            applied=[name for name, _ in fresh],
            version=max(len(known), VERSION),
            roles=[f"{prefix}_{role}" for prefix in prefixes for role in ("owner", "daemon", "operator", "client")],
            notices=notices,
        )
    except asyncpg.InsufficientPrivilegeError as error:
        refused, hint = str(error.args[0]), error.hint
    finally:
        await conn.close()
    raise DatabaseUnusable(
        f"{refused}. "
        + (
            hint
            or "Who migrates must own the schema rota or be a member of its owner; "
            "for making it, CREATE on the database is needed (grant create on database … to …)"
        )
    )


def apart(text: str) -> list[str]:
    """Return the statements of a migration that can't run in a transaction; of all others, none."""
    if not text.startswith(NO_TRANSACTION):
        return []
    pieces = re.split(r";[ \t]*\n", f"{text}\n")
    return [piece for piece in pieces if re.sub(r"--.*", "", piece).strip()]


async def _apply(conn: asyncpg.Connection, number: int, name: str, text: str) -> None:
    alone = apart(text)
    if alone:
        # Nobody waits behind these. They wait for all transactions that are open, which takes as long as those do.
        await conn.execute("select set_config('lock_timeout', $1, false)", f"{PATIENCE:.0f}s")
        for statement in alone:
            await conn.execute(statement)
    async with conn.transaction():
        await conn.execute("select set_config('lock_timeout', $1, true)", LOCK_WAIT)
        if not alone:
            await conn.execute(text)
        await conn.execute(SQL["record_migration"], number, name, checksum(text))
        if number == VERSION:
            await conn.execute(SQL["stamp_schema"], VERSION, OLDEST_COMPATIBLE)


async def _grant(conn: asyncpg.Connection, prefix: str) -> None:
    async with conn.transaction():
        await conn.execute(
            "select set_config('lock_timeout', $1, true), set_config('rota.role_prefix', $2, true)", LOCK_WAIT, prefix
        )
        await conn.execute(ROLES)


async def _patiently(work: Callable[[], Awaitable[None]], *, what: str) -> None:
    """Do it in spite of others' locks, without making everybody wait behind it: in short tries, with pauses between them."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while loop.time() < deadline:
        try:
            return await work()
        except asyncpg.LockNotAvailableError:
            await asyncio.sleep(PAUSE)
    raise DatabaseUnusable(
        f"{what} waits for a lock that somebody hasn't let go of for {PATIENCE:.0f} s; nothing of it counts as applied. "
        "pg_stat_activity shows the oldest transactions, by xact_start: end the one that holds it, and run this again"
    )


async def missing(dsn: str | None) -> list[str]:
    """Return the migrations that the database hasn't seen, without changing anything. Raises what `migrate` would."""
    conn = await asyncpg.connect(dsn, statement_cache_size=0)  # a pooler is good enough for looking
    try:
        known = await _known(conn)
        _agree(known, await _oldest_compatible(conn, known))
    finally:
        await conn.close()
    return list(MIGRATIONS)[len(known) :]


async def _known(conn: asyncpg.Connection) -> list[tuple[int, str, str]]:
    if not await conn.fetchval("select to_regclass('rota.migrations') is not null"):
        return []
    return [(row["version"], row["name"], row["checksum"]) for row in await conn.fetch(SQL["list_migrations"])]


async def _oldest_compatible(conn: asyncpg.Connection, known: Sequence[object]) -> int:
    """Return which users the schema still serves; only a newer one than ours is worth the question."""
    if len(known) <= VERSION:
        return 0
    return int(await conn.fetchval("select oldest_compatible from rota.meta"))


def _agree(known: Sequence[tuple[int, str, str]], oldest_compatible: int) -> None:
    # While a fleet is being upgraded, old daemons start beside new ones, and their `rota migrate` with them.
    if len(known) > VERSION and oldest_compatible > VERSION:
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
