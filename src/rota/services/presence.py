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

HANDLERS_AGAIN = 60.0
"""Seconds between two times that the handlers' rows are written."""

TAKES_A_PLACE_FOR = 60.0
"""How long after its start a daemon may replace a lost one, which may still count as alive for 15 s."""

MOST_LOST = 1000
"""Most lost daemons that are looked at for handlers of another app."""

LOST_AFTER = 15.0
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
    def names(self) -> Sequence[str]:
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
        self._registered = -HANDLERS_AGAIN
        self._takes_a_place_until = boottime() + TAKES_A_PLACE_FOR
        self.state = "running"
        self.alive = 1
        self.shards: tuple[int, ...] = ()
        """Whose schedules this node looks at; none once it is on its way out."""
        self.reached = 0.0
        """When the database last answered, on this node's clock."""

    async def refuse_foreign_handlers(self, shared: frozenset[str]) -> None:
        """Raise ConfigError if a daemon of another app has a handler of this one, unless it is shared.

        To be called first: it enters this node, so that of two daemons that start at once the later one sees the other.
        """
        async with connection(self._pool) as db:
            await self._register_node(db)
            living = await node_reports.list_nodes(db)
            lost = await node_reports.list_lost_nodes(db, limit=MOST_LOST)
        started = {str(node.node_id): (node.started_at, str(node.node_id)) for node in living}
        before = [node for node in living if started[str(node.node_id)] < started[str(self._node.node_id)]]
        foreign = [
            each
            for each in node_reports.find_foreign_handlers(self._node.app, self._node.names, [*lost, *before])
            if each.handler not in shared
        ]
        if foreign:
            each, more = foreign[0].node, len(foreign) - 1
            names = ", ".join(f'"{name}"' for name in dict.fromkeys(one.handler for one in foreign))
            release = f" (release {each.release})" if each.release else ""
            raise ConfigError(
                f"the handler {foreign[0].handler!r} belongs to the app {each.app!r}{release} on {each.host}:{each.pid} (node "
                f"{str(each.node_id)[:8]}){f', and {more} more' if more else ''}, and this is the app {self._node.app!r}: the two "
                f"would take each other's jobs. Rename one; or allow it with [handlers] shared = [{names}] (ROTA_HANDLERS_SHARED); "
                "or, if the app was renamed, stop the daemons of the old name first, and forget lost ones: rota node forget"
            )

    async def _register_node(self, db: Connection) -> tuple[frozenset[NodeId], int]:
        """Write this node's row. Return which nodes are alive and not draining, and how many of its handlers are known."""
        return await queries.register_node(
            db,
            node=self._node.node_id,
            host=self._node.host,
            pid=self._node.pid,
            rota_version=self._node.rota_version,
            release=self._node.release,
            app=self._node.app,
            handlers=self._node.names,
            queues=list(self._node.queues),
            slots=json.dumps(dict(self._node.queues)),
            tzdata=self._node.tzdata,
            state=self.state,
            shards=self.shards,
            refused=self._refused(),
        )

    async def run_once(self) -> None:
        """Write the node's row, and the handlers' rows now and then."""
        async with connection(self._pool) as db:
            if boottime() - self._registered >= HANDLERS_AGAIN:
                await self._register_handlers(db)
            shown, living, known = None, frozenset[NodeId](), 0
            while shown != self.shards:  # again only when nodes have come or gone
                if self.state != "running":
                    self.shards = ()
                shown = self.shards
                living, known = await self._register_node(db)
                self.shards = shards_of(self._node.node_id, living)
            if known < len(self._node.names):
                await self._register_handlers(db)  # rows without which nothing is claimed have been deleted
            await self._remove_lost_entry(db)
        self.alive = max(1, len(living))
        self.reached = boottime()

    async def _remove_lost_entry(self, db: Connection) -> None:
        """Remove this node from the lost ones after a silence; after its start, remove a lost one of the same host and app."""
        now = boottime()
        started = now < self._takes_a_place_until
        if (started or now - self.reached > LOST_AFTER) and await queries.replace_lost_node(
            db, node=self._node.node_id, host=self._node.host, app=self._node.app, started=started
        ):
            self._takes_a_place_until = now

    async def _register_handlers(self, db: Connection) -> None:
        if await queries.register_handlers(
            db, app=self._node.app, release=self._node.release, handlers=self._node.handler_rows
        ):
            self._registered = boottime()

    async def leave(self) -> None:
        """Delete this node's row."""
        async with connection(self._pool) as db:
            await queries.remove_node(db, node=self._node.node_id)
