"""Run the daemon's own statements from a test with short calls, and dump every table that they may change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from factories import NODE
from rota.db import queries
from rota.db.sql import SQL
from rota.domain.job import FenceToken, NodeId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection, Record

    from rota.db.queries import Lane, SettlementRow
    from rota.domain.job import Claim

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=30)
GRACE = timedelta(seconds=5)


def lanes(handler: str = "h", queue: str = "default", *, group: str | None = None) -> list[Lane]:
    """Return the lanes of all priorities of one handler in one queue, searched from the beginning of time."""
    return [(group or queue, queue, handler, priority, EPOCH) for priority in range(10)]


async def claim(
    conn: Connection[Record],
    slots: int = 10,
    *,
    node: UUID = NODE,
    groups: Mapping[str, int] | None = None,
    where: Sequence[Lane] | None = None,
    total: int | None = None,
    suspects: int = 0,
    lease: timedelta = LEASE,
) -> list[Claim]:
    """Claim as a dispatcher does, by default the jobs of handler h in the queue default."""
    groups = dict(groups) if groups is not None else {"default": slots}
    claims, *_ = await queries.claim_due_jobs(
        conn,
        node=NodeId(node),
        groups=groups,
        lanes=where if where is not None else lanes(),
        suspects=suspects,
        total=sum(groups.values()) if total is None else total,
        lease=lease,
    )
    return claims


async def extend(
    conn: Connection[Record], *claims: tuple[int, int], node: UUID = NODE
) -> dict[FenceToken, tuple[bool | None, bool]]:
    """Extend the node's leases once; return token -> (extended, cancel requested)."""
    return await queries.extend_leases(conn, node=NodeId(node), claims=_fenced(claims), grace=GRACE, patience=10)


async def succeed(
    conn: Connection[Record],
    *attempts: tuple[int, int],
    node: UUID = NODE,
    results: Mapping[int, str] = MappingProxyType({}),
) -> list[int]:
    """Settle jobs as succeeded, with results by token; return the written tokens in order."""
    results_by_token = [(FenceToken(token), result) for token, result in results.items()]
    return sorted(
        await queries.settle_succeeded(conn, node=NodeId(node), attempts=_fenced(attempts), results=results_by_token)
    )


def settlement_row(
    job: tuple[int, int],
    settlement: str = "retry",
    *,
    node: UUID = NODE,
    delay: timedelta | None = timedelta(hours=1),
    run_at: datetime | None = None,
    outcome: str = "failed",
    reason: str | None = None,
    error: str | None = "it broke",
) -> SettlementRow:
    """Return one row of settle_unfinished."""
    if settlement == "bury":
        reason = reason or "exhausted"
    elif settlement == "cancel":
        reason = reason or "moot"
    return (job[0], FenceToken(job[1]), NodeId(node), settlement, delay, run_at, outcome, reason, "ValueError", error)


async def settle(
    conn: Connection[Record], *verdicts: SettlementRow, expired_only: bool = False, alert: str | None = None
) -> dict[FenceToken, str]:
    """Write the settlements; return token -> the resulting settlement."""
    return await queries.settle_unfinished(conn, verdicts, expired_only=expired_only, alert=alert)


async def reap(conn: Connection[Record]) -> dict[FenceToken, str]:
    """Reap the expired leases as a reaper does, each with one more retry."""
    found = await queries.find_expired_leases(conn, beyond=0, limit=1000)
    rows = [settlement_row((t.job_id, t.fence_token), node=t.leased_by, outcome="lost") for t in found]
    return await settle(conn, *rows, expired_only=True) if rows else {}


async def examine_unsettled(
    conn: Connection[Record], *attempts: tuple[int, int], node: UUID = NODE
) -> dict[FenceToken, str]:
    """Return why settlements changed no row."""
    return await queries.examine_unsettled(conn, node=NodeId(node), attempts=_fenced(attempts))


async def dump_all_tables(conn: Connection[Record]) -> dict[str, list[str]]:
    """Return every row of every table of rota with its ctid and xmin.

    Two equal dumps prove that nothing was written between them.
    """
    tables = await conn.fetch(
        """
        select format('%I.%I', n.nspname, c.relname) as name
        from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
        where n.nspname = 'rota' and c.relkind = 'r' and c.relname <> 'migrations'
        order by 1
        """
    )
    shots = (
        f"(select '{name}' as name, array_agg(ctid || ' ' || xmin || ' ' || t::text order by ctid) as all_of_it from {name} as t)"
        for (name,) in tables
    )
    return {row["name"]: row["all_of_it"] or [] for row in await conn.fetch(" union all ".join(shots))}


def sql(name: str) -> str:
    """Return the text of a statement that `rota.db.queries` does not call."""
    return SQL[name]


def sql_literal(value: Any) -> str:
    """Return a value as an SQL literal, for EXECUTE, which takes no parameters."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return str(value)
        case datetime():
            return f"'{value.isoformat()}'"
        case timedelta():
            return f"'{value.total_seconds()} s'"
        case list() | tuple():
            return sql_literal("{" + ",".join(_element(item) for item in value) + "}")
        case _:
            return "'{}'".format(str(value).replace("'", "''"))


def _element(value: Any) -> str:
    match value:
        case None:
            return "null"
        case datetime():
            return f'"{value.isoformat()}"'
        case timedelta():
            return f'"{value.total_seconds()} s"'
        case _:
            return '"{}"'.format(str(value).replace("\\", "\\\\").replace('"', '\\"'))


def _fenced(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, FenceToken]]:
    return [(job_id, FenceToken(token)) for job_id, token in pairs]
