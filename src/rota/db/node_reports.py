"""Read-only queries about nodes, registered handlers, and why a job is not claimed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from rota.db.pool import Connection
    from rota.db.reports import JobDescription

MAX_COUNTED_AHEAD = 1000
"""Jobs ahead of another are counted up to this number."""

SILENT_AFTER = timedelta(seconds=7)
"""A node that was not seen for this long is shown as silent. It should be seen every 5 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingNode:
    """A node that was seen within the last 15 seconds."""

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
    """Time since the node was last seen. A running node is seen every 5 seconds."""

    @property
    def displayed_state(self) -> str:
        """Its state, or `silent` with the seconds: a node that was killed stays listed for 15 seconds."""
        return self.state if self.silent < SILENT_AFTER else f"silent {self.silent // timedelta(seconds=1)}s"

    def claims(self, handler: str, queue: str) -> bool:
        """Return whether this node claims jobs of the handler from the queue."""
        return self.claims_from(queue) and handler in self.handlers

    def slot_group(self, queue: str) -> str:
        """Return the queue if it has slots of its own on this node, else `*`."""
        return queue if queue in self.slots else "*"

    def claims_from(self, queue: str) -> bool:
        """Return whether this node claims jobs from the queue. A queue with 0 slots of its own does not use those of `*`."""
        if self.state != "running" or not {queue, "*"} & set(self.queues):
            return False
        return self.slots.get(queue, self.slots.get("*")) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that stopped within the last day without deregistering, and was not replaced."""

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
    """The number of all lost nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHandler:
    """A handler that a daemon has registered or an operator has paused. `nodes` is the number of living nodes that have it."""

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
    """The number of all handlers, listed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A paused queue or handler."""

    kind: str
    name: str
    reason: str | None
    paused_by: str | None
    paused_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingNode:
    """A node that may claim a given job, with its slots for the job's queue."""

    node_id: UUID
    host: str
    pid: int
    slots: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """The number of jobs that are claimed before a due job, and the nodes that may claim it. `more`: `ahead` is a lower bound."""

    ahead: int
    more: bool
    nodes: Sequence[ServingNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJobs:
    """The number of running jobs of one node, queue and handler."""

    node: UUID | None
    queue: str
    handler: str
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignHandler:
    """A handler of this app that a node of another app has, too."""

    handler: str
    node: LivingNode | LostNode


async def list_nodes(db: Connection) -> list[LivingNode]:
    """Return the living nodes, the oldest first."""
    rows = await db.fetch(SQL["list_nodes"])
    return [LivingNode(**{**row, "slots": json.loads(row["slots"] or "{}")}) for row in rows]


async def list_lost_nodes(db: Connection, *, limit: int = 100) -> list[LostNode]:
    """Return the nodes lost within the last day, the latest first."""
    return [LostNode(**row) for row in await db.fetch(SQL["list_lost_nodes"], limit)]


async def list_paused(db: Connection) -> list[Paused]:
    """Return the paused queues and handlers."""
    return [Paused(**row) for row in await db.fetch(SQL["list_paused"])]


async def list_handler_names(db: Connection) -> list[str]:
    """Return the names of all handlers that a daemon has ever registered."""
    return [row[0] for row in await db.fetch(SQL["list_handler_names"])]


async def list_handlers(db: Connection, *, limit: int | None = None) -> list[KnownHandler]:
    """Return the handlers that daemons have registered or people have paused. A limit of None returns all of them."""
    return [KnownHandler(**row) for row in await db.fetch(SQL["list_handlers"], limit)]


async def count_running_jobs(db: Connection) -> list[RunningJobs]:
    """Return the numbers of running jobs by node, queue and handler."""
    return [RunningJobs(**row) for row in await db.fetch(SQL["count_running_jobs"])]


def count_slots_by_handler(node: LivingNode, queue: str, running: Sequence[RunningJobs]) -> Counter[str]:
    """Return handler -> number of its jobs that take the node's slots for the queue."""
    slots: Counter[str] = Counter()
    for jobs in running:
        if str(jobs.node) == str(node.node_id) and node.slot_group(jobs.queue) == node.slot_group(queue):
            slots[jobs.handler] += jobs.running
    return slots


async def find_queue_position(db: Connection, *, job: JobDescription) -> QueuePosition | None:
    """Return how many jobs are claimed before this one; None if it is not scheduled or no living node would claim it."""
    living = await list_nodes(db)
    serving = [node for node in living if node.claims(job.handler, job.queue)]
    if not serving or job.priority is None:
        return None
    handlers = sorted({name for node in living if node.claims_from(job.queue) for name in node.handlers})
    ahead: int = await db.fetchval(
        SQL["count_jobs_ahead"], job.queue, handlers, job.priority, job.run_at, job.job_id, MAX_COUNTED_AHEAD + 1
    )
    running = await count_running_jobs(db)
    nodes = [
        ServingNode(
            node_id=node.node_id,
            host=node.host,
            pid=node.pid,
            slots=node.slots.get(node.slot_group(job.queue), 0),
            taken=count_slots_by_handler(node, job.queue, running).total(),
        )
        for node in serving
    ]
    return QueuePosition(ahead=min(ahead, MAX_COUNTED_AHEAD), more=ahead > MAX_COUNTED_AHEAD, nodes=nodes)


def is_built_in(handler: str) -> bool:
    """Return whether rota or the configuration defines the handler, rather than the code of an app."""
    return handler == "http" or handler.startswith(("rota.", "http.", "command.", "sql."))


def find_foreign_handlers(
    app: str, handlers: Iterable[str], nodes: Iterable[LivingNode | LostNode]
) -> list[ForeignHandler]:
    """Return the app's handlers that nodes of other apps have, with one node for each handler and app."""
    own = {name for name in handlers if not is_built_in(name)}
    foreign = {
        (handler, node.app): ForeignHandler(handler=handler, node=node)
        for node in nodes
        if node.app not in (None, app)
        for handler in own.intersection(node.handlers)
    }
    return sorted(foreign.values(), key=lambda handler: (handler.handler, handler.node.app or ""))


async def find_why_unclaimed(db: Connection, *, handler: str, queue: str) -> str | None:
    """Return the same as `why_unclaimed`, for the living nodes."""
    return why_unclaimed(handler, queue, await list_nodes(db), await list_handler_names(db))


def why_unclaimed(handler: str, queue: str, nodes: Sequence[LivingNode], known: Sequence[str]) -> str | None:
    """Return why no living node would claim a job of the handler from the queue; None if one would."""
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
