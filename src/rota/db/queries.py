"""The daemon's queries about jobs, nodes and handlers, in the order of a job's life: one typed function per SQL file.

`schedule_queries` has those about schedules. `drivers` runs statements on callers' connections.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

from rota.db.pool import Connection, fetch_one
from rota.db.sql import SQL
from rota.domain.job import Claim, FenceToken, NodeId, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import asyncpg


MAX_SAMPLED_DEAD_LETTERS = 100_000
"""How many dead letters the metrics count."""

MAX_SAMPLED_PAUSES = 100
"""How many paused queues, and how many paused handlers, the metrics show."""

ANY_TIME = datetime.min.replace(tzinfo=UTC)
"""The floor that excludes nothing. It is sent as -infinity, because the owner of the tables can store a run_at before 1970."""

Lane = tuple[str, str, str, int, datetime]
"""Slot group (the queue whose slots the jobs take, or *), queue, handler, priority, floor (the run_at to start the search from)."""


class Claimed(NamedTuple):
    """The result of a claim."""

    claims: list[Claim]
    next_in: timedelta | None = None
    """Time until the next job of the lanes is due."""
    others: bool = False
    """Whether other queues than `known` have scheduled jobs."""
    due_lanes: Sequence[Lane] = ()
    """The lanes that had a due job before the claim, each with the run_at of the first one."""
    ignored: Sequence[int] = ()
    """Jobs that the claim locked but did not change, because a trigger dropped the change."""
    limited: bool = False
    """Whether jobs are due that `claim_limited_jobs` claims."""


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
    groups: Mapping[str, int],
    lanes: Sequence[Lane],
    suspects: int,
    total: int,
    lease: timedelta,
    known: Sequence[str] | None = None,
    only: Sequence[int] | None = None,
    skipped: Sequence[int] | None = None,
) -> Claimed:
    """Claim at most `groups[group]` jobs for each slot group, and `total` in all; `suspects` is a value of `Suspects`.

    known: queues for which `others` of the result is computed; None: it is False
    only, skipped: job_ids to restrict the claim to, or to leave out
    """
    lane_groups, queues, handlers, priorities, floors = zip(*lanes, strict=True)
    rows = await db.fetch(
        SQL["claim_due_jobs"],
        node,
        list(groups),
        list(groups.values()),
        lane_groups,
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
    next_in, others, numbers, run_ats, ignored, limited = rows.pop()[18:]
    due = [(*lanes[number - 1][:4], run_at or ANY_TIME) for number, run_at in zip(numbers, run_ats, strict=True)]
    return Claimed([Claim(*row[:18]) for row in rows], next_in, others, due, ignored or (), limited)


class Cursor(NamedTuple):
    """Where the turns of a slot group and priority stand: the key of the last job that was started."""

    queue: str
    key: str
    """Empty for the jobs without a key, which take turns as one key."""
    left: int
    """How many more jobs of the key may start in the same turn."""


class WalkPosition(NamedTuple):
    """Where a walk over keys stopped: the values of `walked_…` in claim_limited_jobs.sql."""

    priority: int
    part: int
    queue: str
    key: str


class LimitedClaims(NamedTuple):
    """The result of a claim of limited jobs, with the claims in the order of their turns."""

    claimed: Claimed
    weights: Sequence[int]
    """The weight of each claim's key."""
    contended: bool
    """Whether another session had an open key locked."""
    complete: Mapping[str, bool]
    """Slot group -> whether the walk has seen all keys, so that those without a claim have no permit or no due job."""
    stopped: Mapping[str, WalkPosition]
    """Slot group -> where the walk stopped, because it had seen as many keys as one claim may."""


class LimitedSearch(NamedTuple):
    """Where a claim of limited jobs searches, and for how many jobs."""

    node: NodeId
    groups: Mapping[str, int]
    """Slot group -> jobs to claim at most: 0 for a group without a free slot."""
    own_queues: Sequence[str]
    """The queues that have slots of their own on this node."""
    handlers: Sequence[str]
    lanes: Sequence[Lane]
    """Where to search for jobs without a key, which take turns with the others."""
    cursors: Mapping[tuple[str, int], Cursor]
    """(slot group, priority) -> cursor."""
    positions: Mapping[str, WalkPosition]
    """Slot group -> where to resume a walk."""
    suspects: int
    total: int
    lease: timedelta


async def claim_limited_jobs(
    db: Connection, search: LimitedSearch, *, only: Sequence[int] | None, skipped: Sequence[int]
) -> LimitedClaims:
    """Claim jobs that have a key or whose handler or queue has a limit, and in turn with them jobs of the search's lanes.

    only, skipped: job_ids to restrict the claim to, or to leave out
    """
    rows = await _fetch_limited_jobs(db, search, only=only, skipped=skipped, dry_run=False)
    next_in, contended, ignored, complete, *stopped = rows.pop()[22:]
    rows.sort(key=itemgetter(20))
    walked = zip(search.groups, *stopped, strict=True)
    return LimitedClaims(
        Claimed([Claim(*row[:20]) for row in rows], next_in, ignored=ignored or ()),
        [row[21] for row in rows],
        contended,
        dict(zip(search.groups, complete, strict=True)),
        {group: WalkPosition(*position) for group, *position in walked if position[0] is not None},
    )


async def find_limited_jobs(db: Connection, search: LimitedSearch, *, skipped: Sequence[int]) -> list[DueJob]:
    """Return the jobs that `claim_limited_jobs` would claim now."""
    rows = await _fetch_limited_jobs(db, search, only=None, skipped=skipped, dry_run=True)
    names = DueJob._fields
    return [DueJob(*(row[name] for name in names)) for row in rows[:-1]]


async def _fetch_limited_jobs(
    db: Connection, search: LimitedSearch, *, only: Sequence[int] | None, skipped: Sequence[int], dry_run: bool
) -> list[asyncpg.Record]:
    resumed = [search.positions.get(group, (None, None, None, None)) for group in search.groups]
    return await db.fetch(
        SQL["claim_limited_jobs"],
        search.node,
        list(search.groups),
        list(search.groups.values()),
        search.own_queues,
        search.handlers,
        *([lane[column] for lane in search.lanes] for column in range(1, 5)),
        [group for group, _ in search.cursors],
        [priority for _, priority in search.cursors],
        *([cursor[column] for cursor in search.cursors.values()] for column in range(3)),
        *([position[column] for position in resumed] for column in range(4)),
        search.suspects,
        search.total,
        search.lease,
        only,
        list(skipped) or None,
        dry_run,
    )


async def claim_job_without_limits(
    db: Connection, *, node: NodeId, handlers: Sequence[str], lease: timedelta
) -> Claim | None:
    """Claim the first due job of these handlers, even if a limit has no permit. Only for rota.testing."""
    row = await db.fetchrow(SQL["claim_job_without_limits"], node, handlers, lease)
    return None if row is None else Claim(*row)


async def extend_holds(db: Connection, holds: Sequence[tuple[str, timedelta | None, datetime | None]]) -> None:
    """Hold limits: key, and either the length or the end of the hold. A hold that ends later stays."""
    await db.execute(SQL["extend_holds"], *zip(*holds, strict=True))


async def wake_dispatchers(db: Connection) -> None:
    """Notify all dispatchers that a permit is free."""
    await db.execute(SQL["wake_dispatchers"])


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
    """Return the payload of an attempt; None if the node has lost the claim."""
    text: str | None = await db.fetchval(SQL["load_payload"], node, job_id, fence_token)
    return text


async def find_orphaned_claims(
    db: Connection, *, node: NodeId, known: Sequence[FenceToken]
) -> list[tuple[int, FenceToken]]:
    """Return (job_id, fence_token) of this node's claims that it does not know, because the answer to the claim was lost."""
    return [(row[0], row[1]) for row in await db.fetch(SQL["find_orphaned_claims"], node, known)]


async def release_claims(db: Connection, *, node: NodeId, claims: Sequence[tuple[int, FenceToken]]) -> None:
    """Release claims of this node whose handlers were never called. They do not count as attempts."""
    settlements: list[SettlementRow] = [
        (job_id, token, node, "release", timedelta(0), None, "orphaned", None, None, None) for job_id, token in claims
    ]
    await settle_unfinished(db, settlements, expired_only=False, alert=None)


async def extend_leases(
    db: Connection, *, node: NodeId, claims: Sequence[tuple[int, FenceToken]], grace: timedelta, patience: float
) -> dict[FenceToken, tuple[bool | None, bool]]:
    """Return token -> (extended, cancel requested) of the claims that the node still has. `patience` is in seconds.

    extended: False if another session has the row locked, None if a trigger dropped the change
    """
    job_ids, tokens = zip(*claims, strict=True)
    rows = await db.fetch(SQL["extend_leases"], node, job_ids, tokens, grace, timeout=patience)
    return {row[0]: (row[1], row[2]) for row in rows}


async def settle_succeeded(
    db: Connection,
    *,
    node: NodeId,
    attempts: Sequence[tuple[int, FenceToken]],
    results: Sequence[tuple[FenceToken, str]],
) -> list[FenceToken]:
    """Return the tokens of the attempts that were settled. Results go by token, as two attempts of a job may end together."""
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
    """Return the retry settings of the attempts whose claims the node still has."""
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
    row = await fetch_one(db, SQL["find_reaper_work"])
    return ReaperWork(*row)


async def find_expired_leases(db: Connection, *, beyond: int, limit: int) -> list[Terms]:
    """Return the retry settings of running jobs with an expired lease, on any node, in the order of job_id after `beyond`."""
    return [Terms(**row) for row in await db.fetch(SQL["find_expired_leases"], beyond, limit)]


SettlementRow = tuple[
    int, FenceToken, NodeId, str, timedelta | None, datetime | None, str, str | None, str | None, str | None
]
"""job_id, fence_token, leased_by, settlement, delay, run_at, outcome, reason, error_kind, error"""


async def settle_unfinished(
    db: Connection, settlements: Sequence[SettlementRow], *, expired_only: bool, alert: str | None
) -> dict[FenceToken, str]:
    """Return token -> settlement of the attempts that were settled. A request to cancel changes the settlement to 'cancel'."""
    columns = zip(*settlements, strict=True)
    rows = await db.fetch(SQL["settle_unfinished"], *columns, expired_only, alert)
    return {row[1]: row[2] for row in rows}


async def examine_unsettled(
    db: Connection, *, node: NodeId, attempts: Sequence[tuple[int, FenceToken]]
) -> dict[FenceToken, str]:
    """Return token -> 'settled' | 'written' | 'free' | 'held' | 'lost'; see the SQL file for their meaning."""
    job_ids, tokens = zip(*attempts, strict=True)
    return {row[0]: row[1] for row in await db.fetch(SQL["examine_unsettled"], node, job_ids, tokens)}


async def report_progress(
    db: Connection, *, node: NodeId, job_id: int, fence_token: FenceToken, progress: float, note: str | None
) -> bool:
    """Store the progress; return False if the node has lost the claim."""
    return await db.fetchval(SQL["report_progress"], node, job_id, fence_token, progress, note) is not None


async def enqueue_job(db: Connection, *, handler: str, payload: str | None, options: str) -> tuple[int, bool, str]:
    """Return (job_id, created, outcome)."""
    row = await fetch_one(db, SQL["enqueue_job"], handler, payload, options)
    return row[0], row[1], row[2]


async def expire_unstarted_jobs(
    db: Connection, *, limit: int, only: Sequence[int] | None = None
) -> list[asyncpg.Record]:
    """End jobs that did not start in time; return their (job_id, handler, queue, schedule_id)."""
    return await db.fetch(SQL["expire_unstarted_jobs"], limit, only)


async def answer_cancel_requests(
    db: Connection, *, limit: int, only: Sequence[int] | None = None
) -> list[asyncpg.Record]:
    """Cancel scheduled jobs that have a request to cancel; return their (job_id, handler, queue)."""
    return await db.fetch(SQL["answer_cancel_requests"], limit, only)


async def find_salvage_rows(
    db: Connection, *, doing: Literal["expire", "cancel", "promote", "replace"], limit: int
) -> dict[int, str | None]:
    """Return the job_ids, or schedule_ids with names, that a failed statement had selected."""
    return {row[0]: row[1] for row in await db.fetch(SQL["find_salvage_rows"], doing, limit)}


async def raise_fence_tokens(db: Connection) -> bool:
    """Return whether sequences were raised: after a change of server or timeline, or if the tokens were behind the clock."""
    raised: bool = await db.fetchval(SQL["raise_fence_tokens"])
    return raised


async def prune(db: Connection, *, what: str, keep: timedelta, limit: int) -> int:
    """Delete up to `limit` rows older than `keep`; return their number.

    what: attempts, fires, dead_letters, guards, audit or limit_starts
    """
    pruned: int = await db.fetchval(SQL[f"prune_{what}"], keep, limit)
    return pruned


async def record_housekeeping(db: Connection, errors: Mapping[str, str | None]) -> dict[str, str]:
    """Record task -> error (None: it succeeded). Return task -> error of all tasks whose last run failed, on any daemon."""
    rows = await db.fetch(SQL["record_housekeeping"], list(errors), list(errors.values()))
    return {row[0]: row[1] for row in rows}


async def prune_nodes(db: Connection) -> int:
    """Move nodes that were not seen for a minute to the lost nodes; return their number."""
    return len(await db.fetch(SQL["prune_nodes"]))


async def rotate_ledger(db: Connection, *, keep: timedelta) -> tuple[int, int]:
    """Create and drop partitions; return how many of each."""
    row = await fetch_one(db, SQL["rotate_ledger"], keep)
    return row[0], row[1]


async def replace_lost_node(db: Connection, *, node: NodeId, host: str, app: str, started: bool) -> bool:
    """Delete the node from the lost nodes; if it has just started, also one of its host and app. Return whether one was deleted."""
    replaced: int = await db.fetchval(SQL["replace_lost_node"], node, host, app, started)
    return replaced > 0


async def remove_node(db: Connection, *, node: NodeId) -> None:
    """Delete this node's row."""
    await db.execute(SQL["remove_node"], node)


ListedQueue = tuple[str, list[str]]
"""A queue that has scheduled jobs, and which handlers have one there."""


async def list_queues(db: Connection, *, after: str, limit: int, handlers: Sequence[str]) -> list[ListedQueue]:
    """Return the first `limit` queues after `after` that have scheduled jobs, in alphabetical order."""
    return [(row[0], row[1]) for row in await db.fetch(SQL["list_queues"], after, limit, handlers)]


async def make_jobs_due(db: Connection, *, handlers: Sequence[str]) -> None:
    """Set the run_at of these handlers' scheduled jobs to now."""
    await db.execute(SQL["make_jobs_due"], handlers)


async def read_clock(db: Connection) -> datetime:
    """Return the database's time."""
    now: datetime = await db.fetchval(SQL["read_clock"])
    return now


HandlerRow = tuple[str, str | None, int | None, timedelta | None, timedelta | None, timedelta | None, str | None]
"""handler, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery"""


async def register_handlers(db: Connection, *, app: str, release: str | None, handlers: Sequence[HandlerRow]) -> bool:
    """Insert or update handlers; return False if some rows are locked or being inserted by another session."""
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
    """Write this node's row; return the running nodes, and how many of this node's handlers have a row."""
    row = await fetch_one(
        db,
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
    return frozenset(NodeId(UUID(bytes=node_id.bytes)) for node_id in row[0]), row[1]


async def sample_backlog(db: Connection) -> dict[str, Any]:
    """Return the metrics about dead letters, for `Telemetry.backlog_sampled`."""
    sample: dict[str, Any] = {"dead": {}}
    for kind, queue, value in await db.fetch(SQL["sample_backlog"], MAX_SAMPLED_DEAD_LETTERS):
        if kind == "dead":
            sample["dead"][queue] = value
        else:
            sample[kind] = value
    return sample


async def sample_upkeep(db: Connection) -> dict[str, Any]:
    """Return the metrics for `Telemetry.upkeep_sampled`."""
    sample: dict[str, Any] = {"paused": [], "dead_tuples": {}, "housekeeping": {}, "nodes": {}}
    for kind, label, name, value in await db.fetch(SQL["sample_upkeep"], MAX_SAMPLED_PAUSES):
        match kind:
            case "paused":
                sample[kind].append((label, name))
            case "dead_tuples" | "housekeeping" | "nodes":
                sample[kind][name] = value
            case _:
                sample[kind] = value
    return sample
