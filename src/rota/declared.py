"""What `@app.handler` leaves in place of the function: the function, and how to enqueue a job for it, typed."""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rota import client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Unpack

    from rota.client import Columns, Enqueued
    from rota.db.drivers import AsyncConn, SyncConn
    from rota.handlers.codec import Codec

P = TypeVar("P")
J = TypeVar("J")
R = TypeVar("R")


class HandlerFunction(Generic[P, J, R]):
    """A handler as its module sees it. Calling it calls the function, and nothing else."""

    __wrapped__: Callable[[J], R]
    __name__: str

    def __init__(self, name: str, function: Callable[[J], R], codec: Codec) -> None:
        update_wrapper(self, function)
        self.name = name
        """The name under which jobs call it."""
        self._codec = codec

    def __call__(self, job: J, /) -> R:
        """Call the function."""
        return self.__wrapped__(job)

    def __repr__(self) -> str:
        return f"<handler {self.name!r}: {self.__wrapped__!r}>"

    async def enqueue(self, conn: AsyncConn, payload: P, **columns: Unpack[Columns]) -> Enqueued:
        """Insert a job for this handler, as `rota.enqueue` does. Raises InvalidPayload for what the handler could not decode."""
        return await client.enqueue(conn, self.name, self._codec.encode(payload), **columns)

    def enqueue_sync(self, conn: SyncConn, payload: P, **columns: Unpack[Columns]) -> Enqueued:
        """Do the same on a blocking connection, as `rota.enqueue_sync` does."""
        return client.enqueue_sync(conn, self.name, self._codec.encode(payload), **columns)

    async def enqueue_many(self, conn: AsyncConn, payloads: Iterable[P], **columns: Any) -> int:
        """Insert a job for each payload, as `rota.enqueue_many` does; functions in `columns` get the payload itself."""
        return await client.enqueue_many(conn, self.name, payloads, encode=self._codec.encode, **columns)

    def enqueue_many_sync(self, conn: SyncConn, payloads: Iterable[P], **columns: Any) -> int:
        """Do the same on a blocking connection, as `rota.enqueue_many_sync` does."""
        return client.enqueue_many_sync(conn, self.name, payloads, encode=self._codec.encode, **columns)
