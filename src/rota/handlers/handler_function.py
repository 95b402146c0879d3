"""The handler function as `@app.handler` returns it: the function itself, with typed methods that enqueue jobs for it."""

from __future__ import annotations

from functools import wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rota import client
from rota.handlers.python import is_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType
    from typing import Unpack

    from rota.client import Enqueued
    from rota.client.columns import Columns
    from rota.db.drivers import AsyncConn, SyncConn
    from rota.handlers.codec import Codec

    LimitKey = str | Callable[[Any], str | None] | None

P_contra = TypeVar("P_contra", contravariant=True)
J_contra = TypeVar("J_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

HANDLER_CODE: dict[CodeType, tuple[str, bool]] = {}
"""Code object of a declared function -> its handler's name, and whether it is an `async def`. Used by rota.testing."""


class HandlerFunction(Protocol[P_contra, J_contra, R_co]):
    """A declared handler: the user's function, with these attributes added."""

    __name__: str
    name: str
    """The handler's name."""

    def __call__(self, job: J_contra, /) -> R_co:
        """Call the function itself, without middleware."""
        ...

    async def enqueue(self, conn: AsyncConn, payload: P_contra, **columns: Unpack[Columns]) -> Enqueued:
        """Insert a job for this handler, as `rota.enqueue` does, with the handler's limit_key unless `columns` has another.

        Raises InvalidPayload if the handler can't decode the payload.
        """
        ...

    def enqueue_sync(self, conn: SyncConn, payload: P_contra, **columns: Unpack[Columns]) -> Enqueued:
        """Insert a job on a blocking connection, as `rota.enqueue_sync` does."""
        ...

    async def enqueue_many(self, conn: AsyncConn, payloads: Iterable[P_contra], **columns: Any) -> int:
        """Insert a job for each payload, as `rota.enqueue_many` does. Functions in `columns` get the payload itself."""
        ...

    def enqueue_many_sync(self, conn: SyncConn, payloads: Iterable[P_contra], **columns: Any) -> int:
        """Insert a job for each payload on a blocking connection, as `rota.enqueue_many_sync` does."""
        ...


class _EnqueueMethods:
    """The enqueue methods of one handler."""

    def __init__(self, name: str, codec: Codec, limit_key: LimitKey) -> None:
        self.name = name
        self._encode = codec.encode
        self._limit_key = limit_key

    async def enqueue(self, conn: Any, payload: Any, **columns: Any) -> Enqueued:
        return await client.enqueue(conn, self.name, self._encode(payload), **self._with_limit_key(columns, payload))

    def enqueue_sync(self, conn: Any, payload: Any, **columns: Any) -> Enqueued:
        return client.enqueue_sync(conn, self.name, self._encode(payload), **self._with_limit_key(columns, payload))

    async def enqueue_many(self, conn: Any, payloads: Iterable[Any], **columns: Any) -> int:
        columns = {"limit_key": self._limit_key, **columns}
        return await client.enqueue_many(conn, self.name, payloads, encode=self._encode, **columns)

    def enqueue_many_sync(self, conn: Any, payloads: Iterable[Any], **columns: Any) -> int:
        columns = {"limit_key": self._limit_key, **columns}
        return client.enqueue_many_sync(conn, self.name, payloads, encode=self._encode, **columns)

    def _with_limit_key(self, columns: dict[str, Any], payload: Any) -> dict[str, Any]:
        if self._limit_key is None or "limit_key" in columns:
            return columns
        return {**columns, "limit_key": limit_key_of(self._limit_key, payload)}


def limit_key_of(limit_key: LimitKey, payload: Any) -> str | None:
    """Return the key of a job with this payload."""
    return limit_key(payload) if callable(limit_key) else limit_key


def declare(
    name: str, function: Callable[[Any], Any], codec: Codec, limit_key: LimitKey = None
) -> HandlerFunction[Any, Any, Any]:
    """Add the attributes to the function and return it. A function that can't take them, or is declared already, is wrapped."""
    if (code := getattr(unwrap(function), "__code__", None)) is not None:
        HANDLER_CODE[code] = (name, is_async(function))
    enqueue_methods = _EnqueueMethods(name, codec, limit_key)
    if hasattr(function, "enqueue") or not hasattr(function, "__dict__") or hasattr(function, "__func__"):
        function = _wrap(function)
    for attribute in ("name", "enqueue", "enqueue_sync", "enqueue_many", "enqueue_many_sync"):
        setattr(function, attribute, getattr(enqueue_methods, attribute))
    return cast("HandlerFunction[Any, Any, Any]", function)


def _wrap(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(function)
    def call(job: Any) -> Any:
        return function(job)

    return call
