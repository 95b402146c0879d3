"""Which server and timeline a connection leads to, so that a daemon never works on two histories of one database."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rota.db.connecting import NoServerFits

if TYPE_CHECKING:
    from collections.abc import Callable


class Server(NamedTuple):
    """A database on a server: it is the same history as long as none of these changes. A promotion begins a new timeline."""

    system_identifier: int
    database_oid: int
    timeline: int


class ServerHistory:
    """The newest server that this daemon has seen. Safe to use from several threads."""

    def __init__(self, newest: Server | None = None, *, on_move: Callable[[], None] | None = None) -> None:
        """`on_move` is called, on the thread that has seen it, when a connection leads to a newer server than those before."""
        self.newest = newest
        self._on_move = on_move
        self._left: set[tuple[int, int]] = set()

    def check(self, server: Server) -> None:
        """Take note of the server of a new connection. Raises NoServerFits for an older one, whose history has been given up."""
        newest = self.newest
        if server == newest:
            return
        database = server[:2]
        if newest is not None:
            is_same = database == newest[:2]
            if database in self._left or (is_same and server.timeline < newest.timeline):
                raise NoServerFits(
                    f"an older primary has come back: timeline {server.timeline} of system {server.system_identifier}, "
                    f"while this daemon has worked on timeline {newest.timeline} of system {newest.system_identifier}"
                )
            if not is_same:
                self._left.add(newest[:2])
        self.newest = server
        if newest is not None and self._on_move is not None:
            self._on_move()
