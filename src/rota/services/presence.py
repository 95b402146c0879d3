"""Keep this node's row in rota.nodes, for operators and gauges. Jobs depend on leases, never on this row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rota.db import node_reports, queries
from rota.db.pool import Connection, Pool, connection
from rota.domain.job import NodeId
from rota.domain.shards import shards_of
from rota.errors import ConfigError
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rota.handlers import Handler

REGISTER_HANDLERS_SECONDS = 60.0
"""The handlers' rows are written again after this time."""

REPLACE_LOST_SECONDS = 60.0
"""How long after its start a daemon may replace a lost one. A killed daemon counts as alive for another 15 s."""

MAX_LOST_NODES = 1000
"""At most this many lost daemons are searched for handlers of another app."""

LOST_AFTER_SECONDS = 15.0
"""A daemon whose row is older than this is listed as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The contents of a node's row."""

    node_id: NodeId
    host: str
    pid: int
    rota_version: str
    release: str | None
    app: str
    handlers: Mapping[str, Handler]
    queues: Mapping[str, int]
    tzdata: str | None

    @property
    def handler_rows(self) -> list[queries.HandlerRow]:
        """The handlers and their defaults, as `rota.handlers` shows them."""
        return [handler.row for handler in self.handlers.values()]

    @property
    def handler_names(self) -> Sequence[str]:
        """The handlers' names."""
        return sorted(self.handlers)


class Presence:
    """Service: refreshes this node's row, with its handlers and queues."""

    name = "presence"
    interval: timedelta | None = timedelta(seconds=5)

    def __init__(self, pool: Pool, node: Node, refused: Callable[[], str | None] = lambda: None) -> None:
        self._pool = pool
        self._node = node
        self._refused = refused
        self._handlers_registered_at = -REGISTER_HANDLERS_SECONDS
        self._may_replace_lost_until = boottime() + REPLACE_LOST_SECONDS
        self.state = "running"
        self.alive = 1
        self.shards: tuple[int, ...] = ()
        """The shards whose schedules this node plans; empty once it drains."""
        self.database_reached_at = 0.0
        """When the database last answered, on this node's clock."""

    async def refuse_foreign_handlers(self, shared: frozenset[str]) -> None:
        """Raise ConfigError if a daemon of another app has a handler of this one, unless it is shared.

        Writes this node's row first: of two daemons that start at the same time, the later one finds the other's row.
        """
        async with connection(self._pool) as db:
            await self._register_node(db)
            living = await node_reports.list_nodes(db)
            lost = await node_reports.list_lost_nodes(db, limit=MAX_LOST_NODES)
        started = {str(node.node_id): (node.started_at, str(node.node_id)) for node in living}
        before = [node for node in living if started[str(node.node_id)] < started[str(self._node.node_id)]]
        foreign = [
            handler
            for handler in node_reports.find_foreign_handlers(
                self._node.app, self._node.handler_names, [*lost, *before]
            )
            if handler.handler not in shared
        ]
        if foreign:
            other, more = foreign[0].node, len(foreign) - 1
            names = ", ".join(f'"{name}"' for name in dict.fromkeys(handler.handler for handler in foreign))
            release = f" (release {other.release})" if other.release else ""
            raise ConfigError(
                f"the handler {foreign[0].handler!r} belongs to the app {other.app!r}{release} on {other.host}:{other.pid} (node "
                f"{str(other.node_id)[:8]}){f', and {more} more' if more else ''}, and this is the app {self._node.app!r}: the two "
                f"would take each other's jobs. Rename one; or allow it with [handlers] shared = [{names}] (ROTA_HANDLERS_SHARED); "
                "or, if the app was renamed, stop the daemons of the old name first, and forget lost ones: rota node forget"
            )

    async def _register_node(self, db: Connection) -> tuple[frozenset[NodeId], int]:
        """Write this node's row. Return the running nodes, and how many of this node's handlers have a row."""
        return await queries.register_node(
            db,
            node=self._node.node_id,
            host=self._node.host,
            pid=self._node.pid,
            rota_version=self._node.rota_version,
            release=self._node.release,
            app=self._node.app,
            handlers=self._node.handler_names,
            queues=list(self._node.queues),
            slots=json.dumps(dict(self._node.queues)),
            tzdata=self._node.tzdata,
            state=self.state,
            shards=self.shards,
            refused=self._refused(),
        )

    async def run_once(self) -> None:
        """Write the node's row, and from time to time the handlers' rows."""
        async with connection(self._pool) as db:
            if boottime() - self._handlers_registered_at >= REGISTER_HANDLERS_SECONDS:
                await self._register_handlers(db)
            written_shards, living, known = None, frozenset[NodeId](), 0
            while written_shards != self.shards:  # again only when nodes have come or gone
                if self.state != "running":
                    self.shards = ()
                written_shards = self.shards
                living, known = await self._register_node(db)
                self.shards = shards_of(self._node.node_id, living)
            if known < len(self._node.handler_names):
                await self._register_handlers(db)  # some rows were deleted, without which no job is claimed
            await self._remove_lost_entry(db)
        self.alive = max(1, len(living))
        self.database_reached_at = boottime()

    async def _remove_lost_entry(self, db: Connection) -> None:
        """After a silence, delete this node from the lost ones. After its start, delete a lost node of the same host and app."""
        now = boottime()
        started = now < self._may_replace_lost_until
        if (started or now - self.database_reached_at > LOST_AFTER_SECONDS) and await queries.replace_lost_node(
            db, node=self._node.node_id, host=self._node.host, app=self._node.app, started=started
        ):
            self._may_replace_lost_until = now

    async def _register_handlers(self, db: Connection) -> None:
        if await queries.register_handlers(
            db, app=self._node.app, release=self._node.release, handlers=self._node.handler_rows
        ):
            self._handlers_registered_at = boottime()

    async def leave(self) -> None:
        """Delete this node's row."""
        async with connection(self._pool) as db:
            await queries.remove_node(db, node=self._node.node_id)
