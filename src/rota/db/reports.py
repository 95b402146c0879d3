"""What people ask about jobs, dead letters and daemons: one typed function for each reading file in sql/queries.

Nothing here locks or changes anything. `schedule_reports` has what they ask about schedules.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from rota.db.pool import Connection

COUNTED = 1_000_000
"""Most live jobs that a summary for people counts one by one."""

EXPLORED = 50_000
"""Most lanes that a summary for people looks for among more jobs than that."""

MOST_AHEAD = 1000
"""Up to how many jobs ahead of another are counted."""

SHOWN = 1000
"""Most lanes that a summary names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """Where a job stands, and the terms on which it is tried again; without what it carries."""

    job_id: int
    handler: str
    queue: str
    state: str
    priority: int | None
    run_at: datetime | None
    scheduled_for: datetime
    attempt: int
    max_attempts: int
    losses: int | None
    releases: int | None
    delivery: str
    backoff_base: timedelta
    backoff_cap: timedelta
    retry_for: timedelta | None
    timeout: timedelta | None
    start_by: datetime | None
    unique_key: str | None
    schedule_id: int | None
    created_at: datetime | None
    created_by: str | None
    started_at: datetime | None
    finished_at: datetime | None
    node: UUID | None
    fence_token: int | None
    lease_expires_at: datetime | None
    cancel_requested: bool
    last_error_kind: str | None
    progress: float | None
    progress_note: str | None
    note: str | None
    paused: bool
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingNode:
    """A daemon that claims jobs of the handler and queue in question, and the slots it has for them."""

    node_id: UUID
    host: str
    pid: int
    slots: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInLine:
    """What a due job waits for: a free slot, and the jobs that are claimed before it (`more`: at least so many)."""

    ahead: int
    more: bool
    nodes: Sequence[ServingNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJobs:
    """How many jobs of a queue and handler a node runs."""

    node: UUID | None
    queue: str
    handler: str
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobValues:
    """What a job carries, as JSON text."""

    payload: str | None
    checkpoint: str | None
    meta: str | None
    result: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An attempt that did not succeed."""

    attempt: int
    fence_token: int
    node: UUID | None
    started_at: datetime | None
    finished_at: datetime
    outcome: str
    error_kind: str | None
    error: str | None
    redriven_at: datetime | None
    """When the dead letter that this attempt made was redriven, by whom, and for what reason it was dead."""
    redriven_by: str | None
    dead_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A job in a list."""

    job_id: int
    handler: str
    queue: str
    state: str
    priority: int | None
    run_at: datetime | None
    attempt: int
    max_attempts: int | None
    started_at: datetime | None
    finished_at: datetime | None
    last_error_kind: str | None
    schedule_id: int | None
    schedule: str | None
    """The schedule's name; None for no schedule, or one that was removed."""
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which dead letters; None lets everything through. `before`: those that died before."""

    handler: str | None = None
    queue: str | None = None
    reason: str | None = None
    error_kind: str | None = None
    before: datetime | None = None

    @property
    def values(self) -> tuple[str | None, str | None, str | None, str | None, datetime | None]:
        """The first five parameters of every statement about dead letters."""
        return self.handler, self.queue, self.reason, self.error_kind, self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterLine:
    """A dead letter in a list."""

    job_id: int
    handler: str
    queue: str
    reason: str
    error_kind: str | None
    attempt: int
    max_attempts: int | None
    delivery: str | None
    created_by: str
    started_at: datetime | None
    finished_at: datetime
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterGroup:
    """Dead letters of one handler and queue, of one reason and kind of error; `sample` is the job_id of the latest job."""

    handler: str
    queue: str
    reason: str
    error_kind: str | None
    letters: int
    at_most_once: int
    oldest: datetime
    newest: datetime
    sample: int
    now: datetime
    total: int
    """How many groups there are, listed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The live jobs of one queue and handler, or of one priority among them. The counts may be lower bounds: see Backlog."""

    queue: str
    handler: str
    due: int
    running: int
    retrying: int
    future: int
    expired: int
    oldest_due: timedelta | None
    oldest_running: timedelta | None = None
    priority: int | None = None
    registered: bool = True
    """Whether a daemon has ever registered the handler."""

    def __add__(self, other: Lane) -> Lane:
        """Return both together, without a priority."""
        return replace(
            self,
            due=self.due + other.due,
            running=self.running + other.running,
            retrying=self.retrying + other.retrying,
            future=self.future + other.future,
            expired=self.expired + other.expired,
            oldest_due=_longest(self.oldest_due, other.oldest_due),
            oldest_running=_longest(self.oldest_running, other.oldest_running),
            priority=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The live jobs by lane. Ages, expired leases and running jobs are exact at any size."""

    lanes: Sequence[Lane]
    """One for each queue, handler and priority."""
    unnamed: Sequence[Lane] = ()
    """The other lanes added up by priority, without a handler, and without a queue where no daemon serves it."""
    at_least: bool = False
    """Whether the numbers of due, retrying and future jobs are lower bounds, because there are too many to count."""
    unexplored: bool = False
    """Whether there are more lanes than were looked for, all of them of handlers that no daemon has registered."""
    more_lanes: int = 0
    """How many lanes `unnamed` stands for."""
    more_queues: int = 0
    """How many queues the lanes without a queue stand for."""

    @property
    def by_handler(self) -> list[Lane]:
        """The named lanes with all their priorities together, in the order of their names."""
        merged: dict[tuple[str, str], Lane] = {}
        for lane in self.lanes:
            key = lane.queue, lane.handler
            merged[key] = merged[key] + lane if key in merged else lane
        return list(merged.values())


def _longest(one: timedelta | None, other: timedelta | None) -> timedelta | None:
    return max((each for each in (one, other) if each is not None), default=None)


SILENT = timedelta(seconds=7)
"""How long a node may say nothing until people are told so: it has missed a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingNode:
    """A daemon that was seen within the last 15 seconds."""

    node_id: UUID
    host: str
    pid: int
    rota_version: str
    release: str | None
    app: str | None
    handlers: Sequence[str]
    queues: Sequence[str]
    slots: Mapping[str, int]
    """Slots by queue."""
    state: str
    tzdata: str | None
    started_at: datetime
    up: timedelta
    silent: timedelta
    """Since it was last seen; a daemon that lives says so every 5 seconds."""

    @property
    def standing(self) -> str:
        """Its state, as long as it speaks: one that was killed is listed for a while, and does nothing."""
        return self.state if self.silent < SILENT else f"silent {self.silent // timedelta(seconds=1)}s"

    def claims(self, handler: str, queue: str) -> bool:
        """Whether this daemon takes jobs of that handler from that queue."""
        return self.claims_from(queue) and handler in self.handlers

    def room(self, queue: str) -> str:
        """Return the name under which this daemon counts the slots for that queue: its own, or `*`."""
        return queue if queue in self.slots else "*"

    def claims_from(self, queue: str) -> bool:
        """Whether this daemon takes jobs from that queue. One that has no slot here is not served by `*` either."""
        if self.state != "running" or not {queue, "*"} & set(self.queues):
            return False
        return self.slots.get(queue, self.slots.get("*")) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A daemon that vanished within a day, and has neither said goodbye nor been replaced."""

    node_id: UUID
    host: str
    pid: int
    rota_version: str
    release: str | None
    app: str | None
    handlers: Sequence[str]
    seen_at: datetime
    silent: timedelta
    lost: int
    """How many there are in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Housekeeping:
    """A piece of housekeeping that is not in order: its last run failed, or its last success is too old."""

    piece: str
    succeeded_at: datetime
    error: str | None
    age: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHandler:
    """A handler that daemons have registered, or that was paused; `nodes`: how many living daemons have it."""

    handler: str
    app: str | None
    release: str | None
    queue: str | None
    max_attempts: int | None
    timeout: timedelta | None
    delivery: str | None
    seen_at: datetime | None
    nodes: int
    paused: bool
    pause_reason: str | None
    paused_by: str | None
    paused_at: datetime | None
    now: datetime
    total: int
    """How many handlers there are, listed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A queue or a handler that was told to wait."""

    kind: str
    name: str
    reason: str | None
    paused_by: str | None
    paused_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLook:
    """What the server says of itself."""

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
    """A setting that endangers jobs: of the login named, or of this session."""

    login: str | None
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A job or schedule with which the database refuses an operation of a daemon, with an error of this kind."""

    doing: str
    what: str
    id: int
    kind: str
    age: timedelta
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimit:
    """How many connections the server, the database or the login allows, and how many are open."""

    scope: str
    allowed: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """A stored value that can't be computed with, and the job or schedule that has it."""

    owner: str
    column_name: str
    value: str


async def find_bad_values(db: Connection) -> list[BadValue]:
    """Return the first values past the constraints. Reads all live jobs: only for a command that has failed already."""
    return [BadValue(**row) for row in await db.fetch(SQL["find_bad_values"], timeout=10)]


async def describe_job(db: Connection, *, job_id: int) -> JobDescription | None:
    """Return where the job stands; None for one that nobody knows."""
    row = await db.fetchrow(SQL["describe_job"], job_id)
    return None if row is None else JobDescription(**row)


async def count_running_jobs(db: Connection) -> list[RunningJobs]:
    """Return the numbers of running jobs."""
    return [RunningJobs(**row) for row in await db.fetch(SQL["count_running_jobs"])]


def holders_of_slots(node: LivingNode, queue: str, running: Sequence[RunningJobs]) -> Counter[str]:
    """Return which handlers' jobs take the node's slots for the queue, and how many each."""
    found: Counter[str] = Counter()
    for each in running:
        if str(each.node) == str(node.node_id) and node.room(each.queue) == node.room(queue):
            found[each.handler] += each.running
    return found


async def find_place_in_line(db: Connection, *, job: JobDescription) -> PlaceInLine | None:
    """Return what a due job waits for; None where no living daemon would claim it."""
    living = await list_nodes(db)
    serving = [node for node in living if node.claims(job.handler, job.queue)]
    if not serving or job.priority is None:
        return None
    handlers = sorted({name for node in living if node.claims_from(job.queue) for name in node.handlers})
    ahead: int = await db.fetchval(
        SQL["count_jobs_ahead"], job.queue, handlers, job.priority, job.run_at, job.job_id, MOST_AHEAD + 1
    )
    running = await count_running_jobs(db)
    nodes = [
        ServingNode(
            node_id=node.node_id,
            host=node.host,
            pid=node.pid,
            slots=node.slots.get(node.room(job.queue), 0),
            taken=holders_of_slots(node, job.queue, running).total(),
        )
        for node in serving
    ]
    return PlaceInLine(ahead=min(ahead, MOST_AHEAD), more=ahead > MOST_AHEAD, nodes=nodes)


async def read_job_values(db: Connection, *, job_id: int) -> JobValues | None:
    """Return what the job carries, for those who asked for it by name."""
    row = await db.fetchrow(SQL["read_job_values"], job_id)
    return None if row is None else JobValues(**row)


async def list_attempts(db: Connection, *, job_id: int, with_errors: bool) -> list[Tried]:
    """Return the job's attempts that did not succeed, newest first."""
    return [Tried(**row) for row in await db.fetch(SQL["list_attempts"], job_id, with_errors)]


async def list_jobs(
    db: Connection,
    *,
    state: str | None,
    handler: str | None,
    queue: str | None,
    limit: int,
    schedule_id: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[JobLine]:
    """Return jobs, newest first. `since` and `until` are compared with when a job ended, began (if it runs) or is due."""
    rows = await db.fetch(SQL["list_jobs"], state, handler, queue, schedule_id, since, until, limit)
    return [JobLine(**row) for row in rows]


async def list_dead_letters(db: Connection, *, which: LetterFilter, limit: int) -> list[LetterLine]:
    """Return dead letters, oldest job first."""
    return [LetterLine(**row) for row in await db.fetch(SQL["list_dead_letters"], *which.values, limit)]


async def summarise_dead_letters(db: Connection, *, which: LetterFilter, limit: int | None = None) -> list[LetterGroup]:
    """Return counts of dead letters, the most frequent group first. A limit of None returns all groups."""
    return [LetterGroup(**row) for row in await db.fetch(SQL["summarise_dead_letters"], *which.values, limit)]


async def summarise_live_jobs(
    db: Connection, *, counted: int = COUNTED, explored: int = EXPLORED, shown: int = SHOWN
) -> Backlog:
    """Return the live jobs by lane: see the query for the bounds."""
    named: list[Lane] = []
    unnamed: list[Lane] = []
    totals: dict[str, Any] = {}
    for row in await db.fetch(SQL["summarise_live_jobs"], counted, explored, shown):
        values = dict(row)
        totals = {name: values.pop(name) for name in ("at_least", "unexplored", "more_lanes", "more_queues")}
        into = unnamed if values["handler"] is None else named
        into.append(Lane(**values | {"queue": values["queue"] or "", "handler": values["handler"] or ""}))
    return Backlog(lanes=named, unnamed=unnamed, **totals)


async def list_nodes(db: Connection) -> list[LivingNode]:
    """Return the living daemons, oldest first."""
    rows = await db.fetch(SQL["list_nodes"])
    return [LivingNode(**{**row, "slots": json.loads(row["slots"] or "{}")}) for row in rows]


async def list_lost_nodes(db: Connection, *, limit: int = 100) -> list[LostNode]:
    """Return daemons that vanished within a day, the last ones first."""
    return [LostNode(**row) for row in await db.fetch(SQL["list_lost_nodes"], limit)]


async def list_housekeeping(db: Connection, *, patience: timedelta) -> list[Housekeeping]:
    """Return the pieces whose last run failed, or that have not succeeded for `patience`."""
    return [Housekeeping(**row) for row in await db.fetch(SQL["list_housekeeping"], patience)]


async def list_paused(db: Connection) -> list[Paused]:
    """Return what is paused."""
    return [Paused(**row) for row in await db.fetch(SQL["list_paused"])]


async def list_handler_names(db: Connection) -> list[str]:
    """Return every handler that a daemon has ever registered."""
    return [row[0] for row in await db.fetch(SQL["list_handler_names"])]


async def list_handlers(db: Connection, *, limit: int | None = None) -> list[KnownHandler]:
    """Return the handlers that daemons have registered or people have paused. A limit of None returns all of them."""
    return [KnownHandler(**row) for row in await db.fetch(SQL["list_handlers"], limit)]


async def count_live_jobs(
    db: Connection, *, handler: str | None, queue: str | None, before: datetime | None
) -> tuple[int, int]:
    """Return how many wait and how many run."""
    row = await db.fetchrow(SQL["count_live_jobs"], handler, queue, before)
    assert row is not None  # noqa: S101  a SELECT of counts
    return row[0], row[1]


async def examine_server(db: Connection) -> ServerLook:
    """Return what the server says of itself."""
    row = await db.fetchrow(SQL["examine_server"])
    assert row is not None  # noqa: S101  a SELECT of constants
    return ServerLook(**row)


async def list_risky_settings(db: Connection) -> list[RiskySetting]:
    """Return the settings of this session, and of other daemons' logins, that endanger jobs."""
    return [RiskySetting(**row) for row in await db.fetch(SQL["list_risky_settings"])]


async def list_refused_rows(db: Connection, *, job_id: int | None = None) -> list[RefusedRow]:
    """Return the rows with which the database refuses operations of living daemons, at most 100."""
    return [RefusedRow(**row) for row in await db.fetch(SQL["list_refused_rows"], job_id)]


async def list_tables_without_autovacuum(db: Connection) -> list[str]:
    """Return the names of rota's tables for which autovacuum is turned off."""
    return [row["name"] for row in await db.fetch(SQL["list_tables_without_autovacuum"])]


async def count_connections(db: Connection) -> list[ConnectionLimit]:
    """Return the limits of connections that apply to this session's login, and how many are open."""
    return [ConnectionLimit(**row) for row in await db.fetch(SQL["count_connections"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignHandler:
    """A handler that a daemon of another app has."""

    handler: str
    node: LivingNode | LostNode


def is_built_in(handler: str) -> bool:
    """Return whether rota itself or the configuration defines the handler, and not the code of an app."""
    return handler == "http" or handler.startswith(("rota.", "http.", "command.", "sql."))


def find_foreign_handlers(
    app: str, handlers: Iterable[str], nodes: Iterable[LivingNode | LostNode]
) -> list[ForeignHandler]:
    """Return which of the app's handlers daemons of other apps have, one daemon for each handler and app."""
    own = {name for name in handlers if not is_built_in(name)}
    found = {
        (handler, node.app): ForeignHandler(handler=handler, node=node)
        for node in nodes
        if node.app not in (None, app)
        for handler in own.intersection(node.handlers)
    }
    return sorted(found.values(), key=lambda each: (each.handler, each.node.app or ""))


async def find_why_unclaimed(db: Connection, *, handler: str, queue: str) -> str | None:
    """Look who is alive, and return why none of them would claim a job of that handler from that queue; None if one would."""
    return why_unclaimed(handler, queue, await list_nodes(db), await list_handler_names(db))


def why_unclaimed(handler: str, queue: str, nodes: Sequence[LivingNode], known: Sequence[str]) -> str | None:
    """Say why no living daemon would claim a job of that handler from that queue; None if one would."""
    if any(node.claims(handler, queue) for node in nodes):
        return None
    waits = "it waits, no attempt is used"
    living = sorted({name for node in nodes for name in node.handlers})
    if not nodes:
        return f"no daemon is alive: {waits}. Start one: rota run --app module:app"
    if handler in living:
        return (
            f"no living daemon serves the queue {queue!r} and has the handler {handler!r}: {waits}. "
            f'Name the queue in [queues] of one that has it, or "*" for all'
        )
    close = get_close_matches(handler, living, 1) or get_close_matches(handler, known, 1)
    if close and close[0] != handler:
        return f"no living daemon has the handler {handler!r}; did you mean {close[0]!r}? As things are, {waits}"
    return f"no living daemon has the handler {handler!r}: {waits}. Start one that has it"
