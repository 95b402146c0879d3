"""Read-only queries about the PostgreSQL server, and about rights and settings that keep daemons from working."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rota.db.pool import Connection, fetch_one
from rota.db.sql import OBJECTS, SQL

if TYPE_CHECKING:
    from datetime import datetime, timedelta


RightsFaultKind = Literal["row_security", "trigger", "replica_role", "replica_identity", "privilege"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Housekeeping:
    """A housekeeping task whose last run failed or whose last success is too old."""

    piece: str
    succeeded_at: datetime
    error: str | None
    age: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties of the server that can make queues slow or unsafe; see sql/queries/server/examine_server.sql."""

    version: str
    read_only: bool
    pid: int
    clock: datetime
    autovacuum: bool
    snapshot_age: timedelta | None
    snapshot_owner: str | None
    prepared_age: timedelta | None
    notifications: float
    user_name: str
    may_run: bool
    daemon_role: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskySetting:
    """A setting that endangers jobs. `login` is None for a setting of this session."""

    login: str | None
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A job or schedule for which the database refuses an operation of a daemon. `kind` is the type of the error."""

    doing: str
    what: str
    id: int
    kind: str
    age: timedelta
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimit:
    """A limit for connections, of the server, the database or the login, and how many are open."""

    scope: str
    allowed: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """A stored value outside of rota's limits, and the job or schedule that has it."""

    owner: str
    column_name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsFault:
    """A missing right or a harmful setting. See sql/queries/server/examine_rights.sql for `object` and `detail`."""

    kind: RightsFaultKind
    object: str
    detail: str

    @property
    def cause(self) -> str:
        """The fault, in a sentence that names the object."""
        match self.kind:
            case "row_security":
                return f"row-level security is enabled on {self.object} and makes the statements of the login {self.detail} fail"
            case "trigger":
                return f"the trigger {self.detail} on {self.object} is disabled"
            case "replica_role":
                return (
                    f"sessions of {self.object} run with session_replication_role = {self.detail}, so no trigger fires"
                )
            case "replica_identity":
                return f"{self.object} is in the publication {self.detail} without a replica identity, so updates and deletes fail"
            case "privilege":
                return f"this login lacks {self.detail} on {self.object}"

    @property
    def cure(self) -> str:
        """How to correct the fault."""
        match self.kind:
            case "row_security":
                return (
                    f"alter table {self.object} disable row level security; or, if its policies are for clients, "
                    f"alter role {self.detail} bypassrls"
                )
            case "trigger":
                return f"alter table {self.object} enable trigger {self.detail}"
            case "replica_role":
                return (
                    f"alter role {self.object} reset session_replication_role, also in alter database … and in the URL"
                )
            case "replica_identity":
                return f"alter table {self.object} replica identity default"
            case "privilege":
                return "rota migrate --roles, and grant rota_daemon to this login"

    @property
    def stops_daemons(self) -> bool:
        """Whether daemons can't work at all."""
        return self.kind in {"row_security", "replica_role", "replica_identity"}


async def examine_server(db: Connection) -> ServerFacts:
    """Return the properties of the server."""
    row = await fetch_one(db, SQL["examine_server"])
    return ServerFacts(**row)


async def list_risky_settings(db: Connection) -> list[RiskySetting]:
    """Return settings that endanger jobs: of this session, and of other logins that may run a daemon."""
    return [RiskySetting(**row) for row in await db.fetch(SQL["list_risky_settings"])]


async def list_refused_rows(db: Connection, *, job_id: int | None = None) -> list[RefusedRow]:
    """Return the rows for which the database refuses operations of living daemons, at most 100."""
    return [RefusedRow(**row) for row in await db.fetch(SQL["list_refused_rows"], job_id)]


async def list_tables_without_autovacuum(db: Connection) -> list[str]:
    """Return the names of rota's tables for which autovacuum is turned off."""
    return [row["name"] for row in await db.fetch(SQL["list_tables_without_autovacuum"])]


async def count_connections(db: Connection) -> list[ConnectionLimit]:
    """Return the connection limits that apply to this login, and how many connections are open."""
    return [ConnectionLimit(**row) for row in await db.fetch(SQL["count_connections"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An object of the schema that is missing, invalid, unlogged, or a function with another source."""

    kind: str
    name: str
    detail: str
    """missing, invalid, unlogged, or the hash of a function's source."""

    @property
    def cause(self) -> str:
        """The fault, in a sentence that names the object."""
        how = self.detail if self.kind != "function" or self.detail == "missing" else "not the one of this version"
        return f"the {self.kind} {self.name} of the schema rota is {how}"

    @property
    def cure(self) -> str:
        """How to repair it."""
        match self.detail:
            case "unlogged":
                return f"alter table rota.{self.name} set logged: a crash of the server empties it until then"
            case "invalid":
                return f"reindex index concurrently rota.{self.name}"
            case _:
                return (
                    "rota migrate --sql prints the statements that create all objects: run the last one that creates it"
                )


async def examine_rights(db: Connection) -> list[RightsFault]:
    """Return the faults that affect any daemon, and the privileges that this login lacks."""
    return [RightsFault(**row) for row in await db.fetch(SQL["examine_rights"])]


async def find_damage(db: Connection) -> list[Damage]:
    """Compare the schema's objects with those that the migrations of this version make; return the differences."""
    made = {tuple(line.split("\t")[:2]): line.split("\t")[2] for line in OBJECTS.splitlines()}
    found = {(row["kind"], row["name"]): row["detail"] for row in await db.fetch(SQL["list_objects"])}
    return [
        Damage(kind=kind, name=name, detail=found.get((kind, name), "missing"))
        for (kind, name), detail in made.items()
        if found.get((kind, name), "missing") != detail
    ]


async def find_sequence_behind(db: Connection) -> int | None:
    """Return the largest job_id if the sequence would give out ids up to it again."""
    largest: int | None = await db.fetchval(SQL["find_sequence_behind"])
    return largest


async def find_bad_values(db: Connection) -> list[BadValue]:
    """Return up to three values outside of rota's limits. Reads all live jobs, so use it only after a command has failed."""
    return [BadValue(**row) for row in await db.fetch(SQL["find_bad_values"], timeout=10)]


async def list_housekeeping(db: Connection, *, patience: timedelta) -> list[Housekeeping]:
    """Return the tasks whose last run failed, or that have not succeeded for `patience`."""
    return [Housekeeping(**row) for row in await db.fetch(SQL["list_housekeeping"], patience)]
