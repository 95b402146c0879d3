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
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from rota.db.blockers import session_name, watching
from rota.db.connecting import close_connection, open_connection
from rota.db.pool import ROUTE_OF_COMMANDS, connect, is_pooled, refuse_encoding
from rota.db.sql import MIGRATIONS, ROLES, SQL
from rota.errors import DatabaseUnusable, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from rota.db.blockers import Blocker
    from rota.db.connecting import Target
    from rota.db.pool import Connection

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
"""Seconds after which a lock that another session holds is given up."""

MIGRATOR_PATIENCE = 3600.0
"""Seconds to wait for another migrator: building an index on a large table takes long."""

NAME_AFTER = 2.0
"""Seconds of waiting for another migrator after which it is named."""

ANSWER_SECONDS = 10.0
"""Limit for the first, short statements: without an answer, the link is cut."""

TURN = 0.2
"""Seconds until a migrator looks again whether another one is done."""

OUR_TURN = "select from rota.migrations where version = 1 for update skip locked"
"""Locks the row that keeps other migrators out until the end of the transaction. No role but the owner may lock it."""

SAFE_NAMES = "set local search_path = pg_catalog, pg_temp"
"""First in each transaction: a function of another login must not run with the migrator's rights."""


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


def script(version: int = 0) -> str:
    """Return the migrations after `version` as one SQL text, for people who apply them with a tool of their own.

    It fails, and changes nothing, on a database of another version.
    """
    if version == VERSION:
        return f"-- The schema of rota is at version {VERSION}: nothing is missing.\n"
    begin = f"begin;\n{SAFE_NAMES};\n"
    what = f"migrations {version + 1} to {VERSION}, for a database at version {version}"
    if not version:
        what = "all migrations in order, for a database that has none of them yet"
    parts = [f"-- The schema of rota, {what}.\n\n{begin}{_version_guard(version) if version else ''}"]
    for number, (name, text) in list(enumerate(MIGRATIONS.items(), 1))[version:]:
        row = SQL["record_migration"].replace("$1", str(number)).replace("$2", f"'{name}'")
        if apart(text):
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
    """Return what gives the roles their rights as one SQL text."""
    if "'" in prefix or "\\" in prefix:
        raise ValueError(prefix)
    return f"begin;\n{SAFE_NAMES};\nset local rota.role_prefix = '{prefix}';\n\n{ROLES}\ncommit;\n"


async def migrate(
    target: Target, *, role_prefix: str | None = None, say: Callable[[str], None] | None = None
) -> Applied:
    """Apply what is missing. A second migrator waits for the first and then finds nothing to do.

    With a prefix the four roles are made, where they don't exist, and get their rights. After new migrations those that have
    rights here get them anew in any case: a daemon without rights on a new table would stand still.

    Raises SchemaMismatch when an applied file has changed since, or when the schema is newer and not for this rota any more;
    DatabaseUnusable when this user may not, or when another session keeps a lock for too long: the message names it, and so
    does what `say` is called with meanwhile.
    """
    conn = await open_connection(target, statement_cache_size=0)
    notices: list[str] = []
    conn.add_log_listener(lambda _, said: notices.append(". ".join(filter(None, (said.message, said.hint)))))
    try:
        encoding = await conn.fetchval("select pg_catalog.current_setting('server_encoding')", timeout=ANSWER_SECONDS)
        refuse_encoding(encoding)
        if is_pooled(conn, pid=await conn.fetchval("select pg_catalog.pg_backend_pid()", timeout=ANSWER_SECONDS)):
            raise DatabaseUnusable(
                "the database URL leads through a connection pooler, which loses the settings that migrations need: "
                "set ROTA_DIRECT_URL (or database.direct_url) to a URL straight to the server"
            )
        await conn.execute(SAFE_NAMES.replace("set local", "set"))
        patiently = Patience(target, conn, say or (lambda _: None))
        applied = await _apply_missing(conn, patiently, role_prefix)
        await conn.execute("select made from rota.rotate_ledger()")
        prefixes = [role_prefix] if role_prefix is not None else []
        if applied:
            prefixes += [row[0] for row in await conn.fetch(SQL["find_role_prefixes"]) if row[0] != role_prefix]
        for prefix in prefixes:
            await patiently.run(partial(_grant, conn, prefix), what="giving the roles their rights")
        return Applied(
            applied=applied,
            version=len(await _known(conn)),
            roles=[f"{prefix}_{role}" for prefix in prefixes for role in ("owner", "daemon", "operator", "client")],
            notices=notices,
        )
    except asyncpg.InsufficientPrivilegeError as error:
        refused, hint = str(error.args[0]), error.hint
    finally:
        await close_connection(conn)
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


async def _apply_missing(conn: asyncpg.Connection, patiently: Patience, role_prefix: str | None) -> list[str]:
    """Apply what is missing and return its names. One migrator at a time, by a row lock on a second connection."""
    applied: list[str] = []
    if not await _known(conn):
        name, text = next(iter(MIGRATIONS.items()))
        try:
            await patiently.run(partial(_apply, conn, 1, name, text), what=f"migration {name}")
            applied.append(name)
        except (asyncpg.DuplicateSchemaError, asyncpg.UniqueViolationError):
            # There was no row to lock yet, and another migrator was faster.
            if not await _known(conn):
                raise
    async with patiently.our_turn():
        known = await _known(conn)
        _agree(known, await _oldest_compatible(conn, known))
        if role_prefix is not None and len(known) > VERSION:
            raise SchemaMismatch(
                f"the schema is at version {len(known)}, newer than this rota knows ({VERSION}): "
                "it would take away the rights on what it doesn't know; give rights with the newer rota"
            )
        for number, (name, text) in list(enumerate(MIGRATIONS.items(), 1))[len(known) :]:
            await patiently.run(partial(_apply, conn, number, name, text), what=f"migration {name}")
            applied.append(name)
    return applied


async def _apply(conn: asyncpg.Connection, number: int, name: str, text: str) -> None:
    alone = apart(text)
    if alone:
        # No other session waits behind these. They wait for all transactions that are open, which takes as long as those do.
        await conn.execute(f"set lock_timeout = '{PATIENCE:.0f}s'")
        for statement in alone:
            await conn.execute(statement)
    async with conn.transaction():
        await conn.execute(f"{SAFE_NAMES}; set local lock_timeout = '{LOCK_WAIT}'")
        if not alone:
            await conn.execute(text)
        await conn.execute(SQL["record_migration"], number, name, checksum(text))
        if number == VERSION:
            await conn.execute(SQL["stamp_schema"], VERSION, OLDEST_COMPATIBLE)


async def _grant(conn: asyncpg.Connection, prefix: str) -> None:
    async with conn.transaction():
        await conn.execute(f"{SAFE_NAMES}; set local lock_timeout = '{LOCK_WAIT}'")
        await conn.execute("select set_config('rota.role_prefix', $1, true)", prefix)
        await conn.execute(ROLES)


class Patience:
    """Waits for locks that other sessions hold, and names those sessions."""

    def __init__(self, target: Target, conn: asyncpg.Connection, say: Callable[[str], None]) -> None:
        self._target = target
        self._conn = conn
        self._say = say
        self._named: set[int] = set()
        self._blockers: Sequence[Blocker] = ()

    async def run(self, work: Callable[[], Awaitable[None]], *, what: str) -> None:
        """Do the work in short tries with pauses between them, so that other sessions don't queue behind a try for long."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        async with watching(self._target, self._conn, on_blocked=self._blocked):
            while asyncio.get_running_loop().time() < deadline:
                try:
                    return await work()
                except asyncpg.LockNotAvailableError:
                    await asyncio.sleep(PAUSE)
        named = f": {self._blockers[0]}. To end it: {self._blockers[0].cure}" if self._blockers else ""
        raise DatabaseUnusable(
            f"{what} waits for a lock that another session has held for {PATIENCE:.0f} s{named}; "
            "nothing of it counts as applied, so run this again afterwards"
        )

    @asynccontextmanager
    async def our_turn(self) -> AsyncIterator[None]:
        """Keep other migrators out, on a connection of its own: some migrations can't run in a transaction."""
        holder = await open_connection(self._target, statement_cache_size=0)
        try:
            # Limits that are set for every session must not end this transaction while a migration runs.
            await holder.execute("set search_path = pg_catalog, pg_temp; set idle_in_transaction_session_timeout = 0")
            if await holder.fetchval("select current_setting('transaction_timeout', true) is not null"):
                await holder.execute("set transaction_timeout = 0")
            await self._wait_for_turn(holder)
            yield
        finally:
            await close_connection(holder)

    async def _wait_for_turn(self, holder: asyncpg.Connection) -> None:
        loop = asyncio.get_running_loop()
        began, told = loop.time(), False
        while not await self._takes_turn(holder):
            waited = loop.time() - began
            if (waited >= NAME_AFTER and not told) or waited >= MIGRATOR_PATIENCE:
                at_work = await holder.fetchrow(SQL["find_migrator"])
                named = session_name(*at_work) if at_work else "a session that can't be found"
                if waited >= MIGRATOR_PATIENCE:
                    raise DatabaseUnusable(
                        f"another migration has been at work for {MIGRATOR_PATIENCE:.0f} s: {named}. "
                        "Wait for its end, or end that session, and run this again"
                    )
                self._say(f"waiting for another migration: {named}")
                told = True
            await asyncio.sleep(TURN)

    async def _takes_turn(self, holder: asyncpg.Connection) -> bool:
        """Lock our row in a new transaction, or return False at once."""
        await holder.execute("begin")
        # Not by waiting for the row: a statement that waits holds a snapshot, and CREATE INDEX CONCURRENTLY waits for its end.
        # By the simple protocol: a finished portal of the extended one would keep its snapshot until the transaction ends.
        if await holder.execute(OUR_TURN) == "SELECT 1":
            return True
        await holder.execute("rollback")
        return False

    def _blocked(self, blockers: Sequence[Blocker]) -> None:
        self._blockers = blockers
        for blocker in blockers:
            if blocker.pid not in self._named:
                self._named.add(blocker.pid)
                self._say(f"waiting: {blocker}")


async def missing(target: Target) -> list[str]:
    """Return the migrations that the database hasn't seen, without changing anything. Raises what `migrate` would."""
    conn = await connect(target, route=ROUTE_OF_COMMANDS, name="rota migrate --check")
    try:
        known = await _known(conn)
        _agree(known, await _oldest_compatible(conn, known))
    finally:
        await close_connection(conn)
    return list(MIGRATIONS)[len(known) :]


async def version_of(dsn: str | None) -> int:
    """Return how many migrations the database has seen. Raises what `migrate` would."""
    return VERSION - len(await missing(dsn))


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
                f"migration {version} of this database is {name} with another content than {ours} of this rota. "
                "Install the rota that made this schema, or delete the schema and all its jobs with "
                "`drop schema rota cascade` and run `rota migrate`"
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
