"""One attempt without a job in the database: for tests, and for `rota call`. Nothing of it is stored.

It is the daemon's own path from a claim to an outcome (decoding, middleware, timeout, what exceptions mean); only what the handler
asks of its job is answered here, and noted.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from uuid import UUID

import asyncpg

from rota.client import encode_payload
from rota.db.connecting import close_connection, open_connection
from rota.domain.job import Claim, FenceToken, NodeId, Suspects
from rota.domain.outcome import Cancelled, Interrupted, LeaseLost, Outcome, StopReason, TimedOut
from rota.domain.payload import encode
from rota.domain.validation import check_handler_name, check_progress, check_types
from rota.errors import ConfigError, InvalidPayload
from rota.handlers.attempt import Attempt
from rota.handlers.handler_function import HANDLER_CODE
from rota.handlers.job import KEEP, Environment, Job, SyncJob, completes_with
from rota.handlers.python import in_thread, is_async, on_loop
from rota.lifecycle.executor import Executor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator, Mapping

    from rota.app import App
    from rota.db.drivers import AsyncConn, SyncConn
    from rota.db.pool import Pool
    from rota.handlers import Handler

P = TypeVar("P")

GRACE = 5.0

_NODE = NodeId(UUID(int=0))
_NO_POOL = cast("Pool", None)

_STOPS: Mapping[StopReason, Outcome] = {
    "cancel": Cancelled("the test asked for it"),
    "drain": Interrupted(began=True),
    "timeout": TimedOut(timedelta(0)),
    "lease_lost": LeaseLost(),
}


class _MadeFor:
    """Base of the made-up jobs. Raises TypeError where a handler of the other kind uses one.

    Without this, `job.report_progress()` in a plain def would only make a coroutine that nothing awaits.
    """

    made_for_async: ClassVar[bool]

    if not TYPE_CHECKING:  # a type checker would take it that any attribute exists

        def __getattribute__(self, name: str) -> Any:
            handler, is_coroutine = HANDLER_CODE.get(sys._getframe(1).f_code, (None, None))  # noqa: SLF001
            if handler is not None and is_coroutine is not type(self).made_for_async:
                what, cure = ("an async def", "make_job") if is_coroutine else ("a plain def", "make_sync_job")
                raise TypeError(f"handler {handler!r} is {what}: call it with a job of {cure}")
            return super().__getattribute__(name)


def _check_stop(reason: str) -> None:
    if reason not in _STOPS:
        raise ValueError(f"reason = {reason!r:.80}: choose one of {', '.join(map(repr, _STOPS))}")


class Noted:
    """What a handler asked of its job."""

    def __init__(self) -> None:
        self.progress: float | None = None
        """What it last reported."""
        self.progress_note: str | None = None
        self.guarded: list[str] = []
        """The resources it guarded."""
        self.completed = False
        """Whether it settled the job itself, by `transaction()` or `complete()`, …"""
        self.result: Any = None
        """… and the result it gave then."""


class InlineJob(_MadeFor, Job[P], Noted):
    """A job without a database: `complete` and `guard` touch nothing, `transaction` needs a connection that was lent."""

    made_for_async = True

    def __init__(self, attempt: Attempt, environment: Environment, payload: P) -> None:
        Job.__init__(self, attempt, environment, payload)
        Noted.__init__(self)

    def stop(self, reason: StopReason) -> None:
        """Make the handler see that it should end."""
        _check_stop(reason)
        self._attempt.interruption = _STOPS[reason]

    @asynccontextmanager
    async def transaction(self, *, checkpoint: Any = KEEP) -> AsyncIterator[Any]:
        """Run a transaction (a savepoint, if one is open) on the connection that was lent."""
        completes = completes_with(checkpoint)
        self._first_transaction(completes=completes)
        if self._environment.handler_pool is None:
            raise RuntimeError(
                "this job has no database behind it: lend it an asyncpg connection, conn=…; rota call takes --dsn"
            )
        async with self._environment.handler_pool.acquire() as conn, conn.transaction():
            yield conn
        if completes:
            self.completed = self._attempt.committed = True
        else:
            await self.save_checkpoint(checkpoint)

    async def complete(self, conn: AsyncConn, result: Any = None) -> None:
        """Note that the handler settled the job itself."""
        del conn
        encode(result, what="result")
        self.completed, self.result, self._attempt.committed = True, result, True

    async def guard(self, conn: AsyncConn, resource: str) -> None:
        """Note the resource."""
        del conn
        check_types(resource=resource)
        self.guarded.append(resource)

    async def save_checkpoint(self, value: Any, conn: AsyncConn | None = None) -> None:
        """Keep it in this job."""
        del conn
        self._attempt.checkpoint = encode(value, what="checkpoint")

    async def report_progress(self, done: float, note: str | None = None) -> None:
        """Note it."""
        check_progress(done, note)
        self.progress, self.progress_note = done, note


class InlineSyncJob(_MadeFor, SyncJob[P], Noted):
    """The same for plain `def` handlers."""

    made_for_async = False

    def __init__(
        self, attempt: Attempt, environment: Environment, payload: P, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        SyncJob.__init__(self, attempt, environment, payload, cast("asyncio.AbstractEventLoop", loop))
        Noted.__init__(self)

    def stop(self, reason: StopReason) -> None:
        """Make the handler see that it should end."""
        _check_stop(reason)
        self._attempt.interruption = _STOPS[reason]
        if self._attempt.stop_flag is not None:
            self._attempt.stop_flag.set()

    @contextmanager
    def transaction(self, *, checkpoint: Any = KEEP) -> Iterator[Any]:
        """Run a transaction (a savepoint, if one is open) on the psycopg connection that was lent."""
        completes = completes_with(checkpoint)
        self._first_transaction(completes=completes)
        if self._environment.blocking is None:
            raise RuntimeError(
                "this job has no database behind it: lend it a psycopg connection, conn=…; rota call takes --dsn"
            )
        with self._environment.blocking.connection() as conn, conn.transaction():
            yield conn
        if completes:
            self.completed = self._attempt.committed = True
        else:
            self.save_checkpoint(checkpoint)

    def complete(self, conn: SyncConn, result: Any = None) -> None:
        """Note that the handler settled the job itself."""
        del conn
        encode(result, what="result")
        self.completed, self.result, self._attempt.committed = True, result, True

    def guard(self, conn: SyncConn, resource: str) -> None:
        """Note the resource."""
        del conn
        check_types(resource=resource)
        self.guarded.append(resource)

    def save_checkpoint(self, value: Any, conn: SyncConn | None = None) -> None:
        """Keep it in this job."""
        del conn
        self._attempt.checkpoint = encode(value, what="checkpoint")

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Note it."""
        check_progress(done, note)
        self.progress, self.progress_note = done, note


class Lent:
    """One connection, where a pool is expected: everything happens on it, in whatever transaction is open there."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def acquire(self, *, timeout: float | None = None) -> Lent:
        """Return what is awaited, or entered, for the connection."""
        del timeout
        return self

    async def release(self, conn: Any, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Do nothing: it stays whose it is."""

    async def _lend(self) -> Any:
        return self._conn

    def __await__(self) -> Any:
        return self._lend().__await__()

    async def __aenter__(self) -> Any:
        return self._conn

    async def __aexit__(self, *_: object) -> None:
        return

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lend it to a plain def handler."""
        yield self._conn


def surroundings(*, conn: Any = None, state: Any = None) -> Environment:
    """Return what an inline job can reach: a connection, if one is lent."""
    lent = None if conn is None else cast("Any", Lent(conn))
    blocking = None if isinstance(conn, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy) else lent
    return Environment(
        node=_NODE,
        installation_id="00000000-0000-0000-0000-000000000000",
        pool=_NO_POOL,
        handler_pool=_NO_POOL if lent is None else lent,
        blocking=blocking,
        app_reference=None,
        state=state,
        job=InlineJob,
        sync_job=InlineSyncJob,
    )


def attempt_at(
    payload: str,
    *,
    handler: str,
    job_id: int = 1,
    queue: str = "default",
    attempt: int = 1,
    fence_token: int = 1,
    scheduled_for: datetime | None = None,
    timeout: timedelta | None = None,
    schedule_id: int | None = None,
    schedule: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    checkpoint: Any = None,
) -> Attempt:
    """Return an attempt at a job that is in no database. Raises TypeError or ValueError for a value of the wrong type."""
    check_handler_name(handler)
    check_types(
        job_id=job_id,
        queue=queue,
        attempt=attempt,
        fence_token=fence_token,
        scheduled_for=scheduled_for,
        timeout=timeout,
        schedule_id=schedule_id,
        schedule=schedule,
        idempotency_key=idempotency_key,
        meta=meta,
    )
    now = datetime.now(UTC)
    claim = Claim(
        job_id=job_id,
        handler=handler,
        queue=queue,
        priority=5,
        payload=payload,
        attempt=attempt,
        fence_token=FenceToken(fence_token),
        run_at=now,
        started_at=now,
        timeout=timeout,
        schedule_id=schedule_id,
        scheduled_for=scheduled_for,
        idempotency_key=idempotency_key,
        meta=None if meta is None else encode(dict(meta), what="meta"),
        checkpoint=None if checkpoint is None else encode(checkpoint, what="checkpoint"),
        schedule=schedule,
    )
    return Attempt(claim, lease=30, asked=0.0, suspect=Suspects.NONE)


FACTS = frozenset(signature(attempt_at).parameters) - {"payload", "handler"}
"""What a made-up job can be given to say of itself."""


def handler_of(app: App, name: str) -> Handler:
    """Return the app's handler, made to run in this process. Raises ConfigError, naming the closest, for one it lacks."""
    check_handler_name(name)
    found = app.handlers.get(name)
    if found is None:
        close = get_close_matches(name, app.handlers, 1)
        hint = f": did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(app.handlers)) or 'none'}"
        raise ConfigError(f"app {app.name!r} has no handler {name!r}{hint}")
    return replace(found, kind=on_loop if is_async(found.function) else in_thread)


async def call_inline(
    app: App, name: str, payload: Any = None, *, dsn: str | None = None, conn: Any = None, **facts: Any
) -> Outcome:
    """Run one attempt of a handler here and now, and return its outcome; nothing about it is stored.

    The app's lifespan is entered around it, unless `state=…` is given. `job.transaction()` runs on `conn`, or on a connection to
    `dsn`, and commits the handler's effect; without either it raises. `facts` are what the job says of itself: `attempt`,
    `job_id`, `queue`, `scheduled_for`, `idempotency_key`, `checkpoint`, `meta`, `timeout` and so on.
    """
    handler = handler_of(app, name)
    try:
        text: str = handler.codec.encode(payload)
    except InvalidPayload:
        text = "null" if payload is None else encode_payload(payload)  # the decoder shall say what is wrong with it
    facts = {"queue": handler.queue or "default", "timeout": handler.timeout} | facts
    async with AsyncExitStack() as stack:
        if dsn is not None:
            conn = await open_connection(dsn)
            stack.push_async_callback(close_connection, conn)
        if "state" in facts:
            state = facts.pop("state")
        else:
            state = None if app.lifespan is None else await stack.enter_async_context(app.lifespan())
        return await run_attempt(handler, attempt_at(text, handler=name, **facts), surroundings(conn=conn, state=state))


async def run_attempt(handler: Handler, attempt: Attempt, environment: Environment) -> Outcome:
    """Take an attempt to its outcome, in a task and a context of its own."""
    ended: list[Outcome] = []
    executor = Executor(
        {attempt.claim.handler: handler},
        environment,
        settle=lambda _, outcome: ended.append(outcome),
        abandon=lambda _: None,
        grace=GRACE,
    )
    executor.start(attempt)
    await executor.finish()
    return ended[0]
