"""Run one attempt without a job in the database: for tests, and for `rota call`. Nothing is stored.

The attempt takes the daemon's own path from a claim to an outcome: decoding, middleware, timeout, exceptions. Only the calls on
the job are answered here.
"""

from __future__ import annotations

import json
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
from rota.domain.payload import encode
from rota.domain.validation import check_handler_name, check_types
from rota.errors import ConfigError, InvalidPayload
from rota.handlers.attempt import STOP_OUTCOMES, Attempt
from rota.handlers.handler_function import HANDLER_CODE
from rota.handlers.job import Job, Mark, SyncJob
from rota.handlers.local_port import Environment, NodePort
from rota.handlers.python import in_thread, is_async, on_loop
from rota.lifecycle.executor import Executor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from rota.app import App
    from rota.db.pool import Pool
    from rota.domain.outcome import Outcome, StopReason
    from rota.handlers import Handler

P = TypeVar("P")

GRACE = 5.0

_NODE = NodeId(UUID(int=0))
_NO_POOL = cast("Pool", None)


class _RecordedCalls:
    """Base of the jobs without a database: records the calls that a handler makes on its job.

    Raises TypeError if a plain def uses an InlineJob, or an async def an InlineSyncJob. Without this check,
    `job.report_progress()` in a plain def would only create a coroutine that nothing awaits.
    """

    made_for_async: ClassVar[bool]
    _attempt: Attempt

    def __init__(self) -> None:
        self.progress: float | None = None
        """The last progress reported."""
        self.progress_note: str | None = None
        self.guarded: list[str] = []
        """The resources guarded."""
        self.completed = False
        """Whether the handler settled the job itself, by `transaction()` or `complete()`."""
        self.result: Any = None
        """The result given to `complete()`."""

    def stop(self, reason: StopReason) -> None:
        """Ask the handler to stop, as a daemon would."""
        if reason not in STOP_OUTCOMES:
            raise ValueError(f"reason = {reason!r:.80}: choose one of {', '.join(map(repr, STOP_OUTCOMES))}")
        self._attempt.interruption = STOP_OUTCOMES[reason]
        if self._attempt.stop_flag is not None:
            self._attempt.stop_flag.set()

    if not TYPE_CHECKING:  # with __getattribute__, a type checker would accept any attribute

        def __getattribute__(self, name: str) -> Any:
            handler, is_coroutine = HANDLER_CODE.get(sys._getframe(1).f_code, (None, None))  # noqa: SLF001
            if handler is not None and is_coroutine is not type(self).made_for_async:
                what, cure = ("an async def", "make_job") if is_coroutine else ("a plain def", "make_sync_job")
                raise TypeError(f"handler {handler!r} is {what}: call it with a job of {cure}")
            return super().__getattribute__(name)


class MemoryPort(NodePort):
    """Records the calls of a handler in memory. `transaction` needs the connection that the caller gave."""

    def __init__(self, environment: Environment, calls: _RecordedCalls) -> None:
        super().__init__(environment)
        self._calls = calls

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction (a savepoint, if one is open) on the asyncpg connection that the caller gave."""
        if self.environment.handler_pool is None:
            raise _no_connection("asyncpg")
        async with self.environment.handler_pool.acquire() as conn, conn.transaction():
            yield conn
        if completes:
            await self.mark(attempt, "committed")

    async def complete(self, attempt: Attempt, conn: Any, result: str | None) -> None:
        """Record the result."""
        del attempt, conn
        self._calls.result = None if result is None else json.loads(result)

    async def mark(self, attempt: Attempt, mark: Mark) -> None:
        """Count the job as committed, also after job.complete(): there is no database to ask."""
        del mark
        self._calls.completed = attempt.committed = True

    async def guard(self, attempt: Attempt, conn: Any, resource: str) -> None:
        """Record the resource."""
        del attempt, conn
        self._calls.guarded.append(resource)

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write nothing: the attempt keeps the checkpoint."""

    async def report_progress(self, attempt: Attempt, done: float, note: str | None) -> None:
        """Record the progress."""
        del attempt
        self._calls.progress, self._calls.progress_note = done, note


class BlockingMemoryPort(MemoryPort):
    """The same for plain `def` handlers."""

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction (a savepoint, if one is open) on the psycopg connection that the caller gave."""
        if self.environment.blocking is None:
            raise _no_connection("psycopg")
        with self.environment.blocking.connection() as conn, conn.transaction():
            yield conn
        if completes:
            await self.mark(attempt, "committed")


def _no_connection(driver: str) -> RuntimeError:
    article = "an" if driver == "asyncpg" else "a"
    return RuntimeError(
        f"this job has no database behind it: lend it {article} {driver} connection, conn=…; rota call takes --dsn"
    )


class InlineJob(_RecordedCalls, Job[P]):
    """A job without a database: `complete` and `guard` touch nothing, `transaction` needs a connection from the caller."""

    made_for_async = True

    def __init__(self, attempt: Attempt, environment: Environment, payload: P) -> None:
        _RecordedCalls.__init__(self)
        Job.__init__(self, attempt, MemoryPort(environment, self), payload)


class InlineSyncJob(_RecordedCalls, SyncJob[P]):
    """The same for plain `def` handlers."""

    made_for_async = False

    def __init__(self, attempt: Attempt, environment: Environment, payload: P, _loop: object = None) -> None:
        _RecordedCalls.__init__(self)
        SyncJob.__init__(self, attempt, BlockingMemoryPort(environment, self), payload)


class SingleConnectionPool:
    """Stands in for a pool with a single connection. All statements run on it, in the transaction that is open there."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def acquire(self, *, timeout: float | None = None) -> SingleConnectionPool:
        """Return an object to await or enter for the connection."""
        del timeout
        return self

    async def release(self, conn: Any, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Do nothing: the connection belongs to the caller."""

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
        """Lend the connection to a plain `def` handler."""
        yield self._conn


def inline_environment(*, conn: Any = None, state: Any = None) -> Environment:
    """Return the environment of a job without a database, or with a single connection."""
    single_connection = None if conn is None else cast("Any", SingleConnectionPool(conn))
    blocking = None if isinstance(conn, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy) else single_connection
    return Environment(
        node=_NODE,
        installation_id="00000000-0000-0000-0000-000000000000",
        pool=_NO_POOL,
        handler_pool=_NO_POOL if single_connection is None else single_connection,
        blocking=blocking,
        app_reference=None,
        state=state,
        job=InlineJob,
        sync_job=InlineSyncJob,
    )


def make_attempt(
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
    """Return an attempt of a job that is not in the database. Raises TypeError or ValueError for an invalid value."""
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
    return Attempt(claim, lease=30, claim_sent_at=0.0, suspect=Suspects.NONE)


JOB_FACTS = frozenset(signature(make_attempt).parameters) - {"payload", "handler"}
"""The facts that a test can set on its job."""


def find_handler(app: App, name: str) -> Handler:
    """Return the app's handler, changed to run in this process. Raises ConfigError, with the closest name, for an unknown one."""
    check_handler_name(name)
    handler = app.handlers.get(name)
    if handler is None:
        close = get_close_matches(name, app.handlers, 1)
        hint = f": did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(app.handlers)) or 'none'}"
        raise ConfigError(f"app {app.name!r} has no handler {name!r}{hint}")
    return replace(handler, kind=on_loop if is_async(handler.function) else in_thread)


async def call_inline(
    app: App, name: str, payload: Any = None, *, dsn: str | None = None, conn: Any = None, **facts: Any
) -> Outcome:
    """Run one attempt of a handler in this process, and return its outcome. Nothing about it is stored.

    The app's lifespan is entered around it, unless `state=…` is given. `job.transaction()` runs on `conn`, or on a connection to
    `dsn`, and commits the handler's effect; without either it raises RuntimeError. `facts` are the job's `attempt`, `job_id`,
    `queue`, `scheduled_for`, `idempotency_key`, `checkpoint`, `meta`, `timeout` and so on.
    """
    handler = find_handler(app, name)
    try:
        text: str = handler.codec.encode(payload)
    except InvalidPayload:
        text = "null" if payload is None else encode_payload(payload)  # the decoder's error describes the problem
    facts = {"queue": handler.queue or "default", "timeout": handler.timeout} | facts
    async with AsyncExitStack() as stack:
        if dsn is not None:
            conn = await open_connection(dsn)
            stack.push_async_callback(close_connection, conn)
        if "state" in facts:
            state = facts.pop("state")
        else:
            state = None if app.lifespan is None else await stack.enter_async_context(app.lifespan())
        return await run_attempt(
            handler, make_attempt(text, handler=name, **facts), inline_environment(conn=conn, state=state)
        )


async def run_attempt(handler: Handler, attempt: Attempt, environment: Environment) -> Outcome:
    """Run an attempt in its own task and context, and return its outcome."""
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
