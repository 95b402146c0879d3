"""What daemons do with jobs, nodes and handlers: one typed function for each of their files in sql/queries, by a job's life.

Nothing here but the call. `schedule_queries` has what they do with schedules; what runs on a connection of somebody else's, of
whatever driver, is in `drivers`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

from rota.db.connecting import NoServerFits
from rota.db.pool import READ_ONLY
from rota.db.server_history import Server, ServerHistory
from rota.db.sql import SQL
from rota.domain.job import Claim, FenceToken, NodeId, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import asyncpg

    from rota.db.pool import Connection

SAMPLED = 100_000
"""Most dead letters that a sample counts."""

PAUSED = 100
"""Most paused queues, and most paused handlers, that a sample shows."""

Lane = tuple[str, str, str, int, datetime]
"""Room (whose slots the jobs take), queue, handler, priority, and floor: the run_at to start the search from."""


class Claimed(NamedTuple):
    """The answer to a claim."""

    claims: list[Claim]
    next_in: timedelta | None = None
    """How long it is until the next due instant in the lanes."""
    others: bool = False
    """Whether there are scheduled jobs in queues outside of `known`."""


class DueJob(NamedTuple):
    """A due job and its lane."""

    job_id: int
    queue: str
    handler: str
    priority: int
    schedule_id: int | None = None


async def claim_due_jobs(
    db: Connection,
    *,
    node: NodeId,
    rooms: Mapping[str, int],
    lanes: Sequence[Lane],
    suspects: int,
    total: int,
    lease: timedelta,
    known: Sequence[str] | None = None,
    only: Sequence[int] | None = None,
    skipped: Sequence[int] | None = None,
) -> Claimed:
    """Claim at most `rooms[room]` jobs for each room, and `total` in all; `suspects` is a value of `Suspects`.

    known: report whether queues other than these have scheduled jobs; None: don't look
    only, skipped: job_ids to restrict the claim to, or to leave out
    """
    lane_rooms, queues, handlers, priorities, floors = zip(*lanes, strict=True)
    rows = await db.fetch(
        SQL["claim_due_jobs"],
        node,
        list(rooms),
        list(rooms.values()),
        lane_rooms,
        queues,
        handlers,
        priorities,
        floors,
        total,
        int(suspects),
        lease,
        known,
        only,
        skipped or None,
    )
    return Claimed([Claim(*row[:18]) for row in rows if row[0] is not None], next_in=rows[0][18], others=rows[0][19])


async def find_due_jobs(
    db: Connection, *, lanes: Sequence[Lane], suspects: int, skipped: Sequence[int], limit: int
) -> list[DueJob]:
    """Return the jobs that a claim of these lanes would try first."""
    _, queues, handlers, priorities, floors = zip(*lanes, strict=True)
    rows = await db.fetch(
        SQL["find_due_jobs"], queues, handlers, priorities, floors, int(suspects), list(skipped), limit
    )
    return [DueJob(*row) for row in rows]


async def bury_unclaimable_job(
    db: Connection, *, job_id: int, error_kind: str, error: str, alert: str | None
) -> int | None:
    """Make a dead letter of a job whose own values make its claim fail.

    Returns the number of its attempts so far, or None if it is locked or no longer scheduled.
    """
    attempts: int | None = await db.fetchval(SQL["bury_unclaimable_job"], job_id, error_kind, error, alert)
    return attempts


async def load_payload(db: Connection, *, node: NodeId, job_id: int, fence_token: FenceToken) -> str | None:
    """Return the payload of an attempt of this node's; None if the claim is no longer the node's."""
    text: str | None = await db.fetchval(SQL["load_payload"], node, job_id, fence_token)
    return text


async def find_orphaned_claims(
    db: Connection, *, node: NodeId, known: Sequence[FenceToken]
) -> list[tuple[int, FenceToken]]:
    """Return (job_id, fence_token) of this node's claims whose answer never reached it."""
    return [(row[0], row[1]) for row in await db.fetch(SQL["find_orphaned_claims"], node, known)]


async def release_claims(db: Connection, *, node: NodeId, claims: Sequence[tuple[int, FenceToken]]) -> None:
    """Give claims of this node back at once, whose handlers were never called."""
    verdicts: list[Verdict] = [
        (job_id, token, node, "release", timedelta(0), None, "orphaned", None, None, None) for job_id, token in claims
    ]
    await settle_unfinished(db, verdicts, expired_only=False, alert=None)


async def extend_leases(
    db: Connection, *, node: NodeId, held: Sequence[tuple[int, FenceToken]], grace: timedelta, patience: float
) -> dict[FenceToken, tuple[bool, bool]]:
    """Return token -> (extended, cancel requested) of what is still this node's."""
    job_ids, tokens = zip(*held, strict=True)
    rows = await db.fetch(SQL["extend_leases"], node, job_ids, tokens, grace, timeout=patience)
    return {row[0]: (row[1], row[2]) for row in rows}


async def settle_succeeded(
    db: Connection,
    *,
    node: NodeId,
    attempts: Sequence[tuple[int, FenceToken]],
    results: Sequence[tuple[FenceToken, str]],
) -> list[FenceToken]:
    """Return the tokens of what was written into the ledger. By token, for two attempts of one job may end together."""
    job_ids, tokens = zip(*attempts, strict=True)
    return (
        await db.fetchval(
            SQL["settle_succeeded"],
            node,
            job_ids,
            tokens,
            [token for token, _ in results],
            [text for _, text in results],
        )
        or []
    )


async def load_terms(db: Connection, *, node: NodeId, attempts: Sequence[tuple[int, FenceToken]]) -> list[Terms]:
    """Return the terms of those attempts that are still this node's."""
    job_ids, tokens = zip(*attempts, strict=True)
    return [Terms(**row) for row in await db.fetch(SQL["load_terms"], node, job_ids, tokens)]


class ReaperWork(NamedTuple):
    """Which kinds of work the reaper has, and the database's time."""

    now: datetime
    expired_leases: bool
    missed_start_by: bool
    cancel_requests: bool


async def find_reaper_work(db: Connection) -> ReaperWork:
    """Return which kinds of work the reaper has."""
    row = await db.fetchrow(SQL["find_reaper_work"])
    assert row is not None  # noqa: S101  it always returns one row
    return ReaperWork(*row)


async def find_expired_leases(db: Connection, *, beyond: int, limit: int) -> list[Terms]:
    """Return the terms of running jobs whose lease has expired, whoever held it, by job_id from `beyond` on."""
    return [Terms(**row) for row in await db.fetch(SQL["find_expired_leases"], beyond, limit)]


Verdict = tuple[
    int, FenceToken, NodeId, str, timedelta | None, datetime | None, str, str | None, str | None, str | None
]
"""job_id, fence_token, leased_by, settlement, delay, run_at, outcome, reason, error_kind, error"""


async def settle_unfinished(
    db: Connection, verdicts: Sequence[Verdict], *, expired_only: bool, alert: str | None
) -> dict[FenceToken, str]:
    """Return token -> settlement of what was written; a request to cancel may have changed it to 'cancel'."""
    columns = zip(*verdicts, strict=True)
    rows = await db.fetch(SQL["settle_unfinished"], *columns, expired_only, alert)
    return {row[1]: row[2] for row in rows}


async def examine_unsettled(
    db: Connection, *, node: NodeId, attempts: Sequence[tuple[int, FenceToken]]
) -> dict[FenceToken, str]:
    """Return token -> 'settled' | 'written' | 'free' | 'held' | 'lost'."""
    job_ids, tokens = zip(*attempts, strict=True)
    return {row[0]: row[1] for row in await db.fetch(SQL["examine_unsettled"], node, job_ids, tokens)}


async def report_progress(
    db: Connection, *, node: NodeId, job_id: int, fence_token: FenceToken, progress: float, note: str | None
) -> bool:
    """Return whether the claim is still this node's, and the progress was written."""
    return await db.fetchval(SQL["report_progress"], node, job_id, fence_token, progress, note) is not None


async def enqueue_job(db: Connection, *, handler: str, payload: str | None, options: str) -> tuple[int, bool, str]:
    """Return (job_id, created, outcome)."""
    row = await db.fetchrow(SQL["enqueue_job"], handler, payload, options)
    assert row is not None  # noqa: S101  a set-returning function that returns one row
    return row[0], row[1], row[2]


async def expire_unstarted_jobs(
    db: Connection, *, limit: int, only: Sequence[int] | None = None
) -> list[asyncpg.Record]:
    """Return (job_id, handler, queue, schedule_id) of the jobs that did not start in time and have ended as expired."""
    return await db.fetch(SQL["expire_unstarted_jobs"], limit, only)


async def answer_cancel_requests(
    db: Connection, *, limit: int, only: Sequence[int] | None = None
) -> list[asyncpg.Record]:
    """Return (job_id, handler, queue) of waiting jobs that were cancelled."""
    return await db.fetch(SQL["answer_cancel_requests"], limit, only)


async def find_salvage_rows(
    db: Connection, *, doing: Literal["expire", "cancel", "promote", "replace"], limit: int
) -> dict[int, str | None]:
    """Return the job_ids or the schedule_ids (with names) that a failed statement would have taken."""
    return {row[0]: row[1] for row in await db.fetch(SQL["find_salvage_rows"], doing, limit)}


async def check_server(db: Connection, history: ServerHistory) -> str | None:
    """Return the installation's id. Raises NoServerFits for a server that takes no writes, and for an older primary."""
    row = await db.fetchrow(SQL["identify_server"])
    if row is None:
        return None
    if row["read_only"]:
        raise NoServerFits(READ_ONLY)
    history.check(Server(row["system_identifier"], row["database_oid"], row["timeline"]))
    installation_id: str = row["installation_id"]
    return installation_id


async def find_writable_server(db: Connection) -> tuple[Server, datetime] | None:
    """Return the server and when it was started, if it takes writes: two addresses may lead to the same one."""
    row = await db.fetchrow(SQL["identify_server"])
    if row is None or row["read_only"]:
        return None
    return Server(row["system_identifier"], row["database_oid"], row["timeline"]), row["started_at"]


async def raise_fence_tokens(db: Connection) -> bool:
    """Return whether sequences were raised: the server or timeline has changed, or the tokens lagged behind the clock."""
    raised: bool = await db.fetchval(SQL["raise_fence_tokens"])
    return raised


async def prune(db: Connection, *, what: str, keep: timedelta, limit: int) -> int:
    """Delete up to `limit` rows older than `keep` of attempts, fires, dead_letters, guards or audit. Return their number."""
    pruned: int = await db.fetchval(SQL[f"prune_{what}"], keep, limit)
    return pruned


async def record_housekeeping(db: Connection, errors: Mapping[str, str | None]) -> dict[str, str]:
    """Record piece -> error (None: it succeeded). Return the same for all pieces whose last run failed, on any daemon."""
    rows = await db.fetch(SQL["record_housekeeping"], list(errors), list(errors.values()))
    return {row[0]: row[1] for row in rows}


async def prune_nodes(db: Connection) -> int:
    """Move nodes not seen for a minute to the lost ones, and return their number."""
    return len(await db.fetch(SQL["prune_nodes"]))


async def rotate_ledger(db: Connection, *, keep: timedelta) -> tuple[int, int]:
    """Return how many partitions were made and dropped."""
    row = await db.fetchrow(SQL["rotate_ledger"], keep)
    assert row is not None  # noqa: S101  a set-returning function that returns one row
    return row[0], row[1]


async def replace_lost_node(db: Connection, *, node: NodeId, host: str, app: str, started: bool) -> bool:
    """Take this node from the lost ones, or (if it has just started) one of its host and app. Return whether there was one."""
    replaced: int = await db.fetchval(SQL["replace_lost_node"], node, host, app, started)
    return replaced > 0


async def remove_node(db: Connection, *, node: NodeId) -> None:
    """Take this node from the list of the living."""
    await db.execute(SQL["remove_node"], node)


async def list_queues(db: Connection, *, after: str, limit: int) -> list[str]:
    """Return the names of queues that have scheduled jobs: in order, the first `limit` of those after that name."""
    return [row[0] for row in await db.fetch(SQL["list_queues"], after, limit)]


async def make_jobs_due(db: Connection, *, handlers: Sequence[str]) -> None:
    """Make the waiting jobs of these handlers due at once."""
    await db.execute(SQL["make_jobs_due"], handlers)


async def read_clock(db: Connection) -> datetime:
    """Return the database's time."""
    now: datetime = await db.fetchval(SQL["read_clock"])
    return now


HandlerRow = tuple[str, str | None, int | None, timedelta | None, timedelta | None, timedelta | None, str | None]
"""handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery"""


async def register_handlers(db: Connection, *, app: str, release: str | None, handlers: Sequence[HandlerRow]) -> bool:
    """Write down handlers with their defaults; return whether all were, for one may be locked or on its way in at this moment."""
    if not handlers:
        return True
    written: int = await db.fetchval(SQL["register_handlers"], app, release, *zip(*handlers, strict=True))
    return written == len(handlers)


async def register_node(
    db: Connection,
    *,
    node: NodeId,
    host: str,
    pid: int,
    rota_version: str,
    release: str | None,
    app: str,
    handlers: Sequence[str],
    queues: Sequence[str],
    slots: str,
    tzdata: str | None,
    state: str,
    shards: Sequence[int],
    refused: str | None = None,
) -> tuple[frozenset[NodeId], int]:
    """Write this node's row, and return which nodes are alive and not on their way out, and how many of its handlers are known."""
    row = await db.fetchrow(
        SQL["register_node"],
        node,
        host,
        pid,
        rota_version,
        release,
        app,
        handlers,
        queues,
        slots,
        tzdata,
        state,
        shards,
        refused,
    )
    assert row is not None  # noqa: S101  a list of subqueries
    return frozenset(NodeId(UUID(bytes=each.bytes)) for each in row[0]), row[1]


async def sample_backlog(db: Connection) -> dict[str, Any]:
    """Return the dead letters' part of what `Telemetry.backlog_sampled` shows."""
    sample: dict[str, Any] = {"dead": {}}
    for kind, queue, value in await db.fetch(SQL["sample_backlog"], SAMPLED):
        if kind == "dead":
            sample["dead"][queue] = value
        else:
            sample[kind] = value
    return sample


async def sample_upkeep(db: Connection) -> dict[str, Any]:
    """Return what `Telemetry.upkeep_sampled` shows."""
    sample: dict[str, Any] = {"paused": [], "dead_tuples": {}, "housekeeping": {}, "nodes": {}}
    for kind, label, name, value in await db.fetch(SQL["sample_upkeep"], PAUSED):
        match kind:
            case "paused":
                sample[kind].append((label, name))
            case "dead_tuples" | "housekeeping" | "nodes":
                sample[kind][name] = value
            case _:
                sample[kind] = value
    return sample
