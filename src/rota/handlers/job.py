"""The job that a handler receives, and the port through which it reaches the daemon and the database."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from rota.domain.job import FenceToken, idempotency_key
from rota.domain.payload import encode
from rota.domain.validation import check_progress, check_types

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from types import TracebackType

    import psycopg

    from rota.db.drivers import AsyncConn, SyncConn
    from rota.db.pool import Connection
    from rota.domain.outcome import StopReason
    from rota.handlers.attempt import Attempt

P = TypeVar("P")

Mark = Literal["completing", "committing", "committed"]
"""Marks of an attempt: job.complete() was called; a COMMIT that settles the job is on its way; that COMMIT succeeded."""


class JobPort(Protocol):
    """The operations that a job needs from the process that runs its attempt.

    Three adapters exist: in the daemon (`local_port`), in a process of the handler's own (`child`), and without a database
    (`inline`). The port of a SyncJob blocks: its coroutines return without suspending.
    """

    installation_id: str
    state: Any
    """The value that the app's lifespan yielded."""

    def transaction(self, attempt: Attempt, *, completes: bool) -> AbstractAsyncContextManager[Any]:
        """Open a transaction and yield its connection; commit at the end. `completes`: the commit settles the job."""

    async def complete(self, attempt: Attempt, conn: Any, result: str | None) -> None:
        """Settle the job as succeeded in the transaction open on `conn`."""

    async def mark(self, attempt: Attempt, mark: Mark) -> None:
        """Set a mark of the attempt."""

    async def guard(self, attempt: Attempt, conn: Any, resource: str) -> None:
        """Raise StaleToken if a later claim has guarded the resource."""

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write the checkpoint, on `conn` if it isn't None. Raises StaleToken if the lease was lost."""

    async def report_progress(self, attempt: Attempt, done: float, note: str | None) -> None:
        """Write the progress. Raises StaleToken if the lease was lost."""


class _Keep:
    """The type of the default of `checkpoint`, because None is a valid checkpoint."""


KEEP: Any = _Keep()


class JobFacts(Generic[P]):
    """The facts of one attempt, which `Job` and `SyncJob` share."""

    __slots__ = ("_attempt", "_port", "payload")

    def __init__(self, attempt: Attempt, port: JobPort, payload: P) -> None:
        self._attempt = attempt
        self._port = port
        self.payload = payload

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job_id} of {self.handler!r}, attempt {self.attempt}, token {self.fence_token}>"

    @property
    def job_id(self) -> int:
        """The job's number, the same for all attempts and redrives."""
        return self._attempt.claim.job_id

    @property
    def handler(self) -> str:
        """The name of this handler."""
        return self._attempt.claim.handler

    @property
    def queue(self) -> str:
        """The queue of the job."""
        return self._attempt.claim.queue

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt.claim.attempt

    @property
    def fence_token(self) -> FenceToken:
        """A number that is larger for every later claim in this installation. Send it along to detect overtaken effects."""
        return self._attempt.claim.fence_token

    @property
    def scheduled_for(self) -> datetime:
        """The instant at which the job was first due, in UTC. Retries don't change it."""
        claim = self._attempt.claim
        return claim.scheduled_for or claim.run_at

    @property
    def idempotency_key(self) -> str:
        """A key that is the same for every attempt of this job. Pass it to services that must not do the work twice."""
        return idempotency_key(self._attempt.claim, self._port.installation_id)

    @property
    def schedule_id(self) -> int | None:
        """The id of the schedule whose fire this job runs, or None."""
        return self._attempt.claim.schedule_id

    @property
    def schedule(self) -> str | None:
        """The name of the schedule whose fire this job runs, or None."""
        return self._attempt.claim.schedule

    @property
    def checkpoint(self) -> Any:
        """The value that this attempt or an earlier one saved last; None at first."""
        text = self._attempt.checkpoint
        return None if text is None else json.loads(text)

    @property
    def meta(self) -> dict[str, Any]:
        """The job's meta object; empty if it has none."""
        meta = self._attempt.claim.meta
        return {} if meta is None else json.loads(meta)

    @property
    def state(self) -> Any:
        """The value that the app's lifespan yielded."""
        return self._port.state

    @property
    def stop_requested(self) -> bool:
        """True once this attempt should end; see `stop_reason`."""
        return self._attempt.interruption is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """'cancel', 'drain', 'timeout' or 'lease_lost'; None while the attempt may go on."""
        return self._attempt.stop_reason


class Job(JobFacts[P]):
    """One attempt, as an `async def` handler sees it."""

    __slots__ = ("_transaction_used",)

    def __init__(self, attempt: Attempt, port: JobPort, payload: P) -> None:
        super().__init__(attempt, port, payload)
        self._transaction_used = False

    @asynccontextmanager
    async def transaction(self, *, checkpoint: Any = KEEP) -> AsyncIterator[Connection]:
        """Run a transaction in which the effect and this job's completion commit together, or neither does.

        Yields an asyncpg connection at READ COMMITTED. An attempt can use it once. With a `checkpoint` (JSON, at most 64 KiB)
        the effect and the checkpoint commit together instead, the job goes on, and it can be used again.
        Raises StaleToken, with nothing committed, if the lease was lost. Only the last statement touches the job's row.
        """
        completes = checkpoint is KEEP
        if self._attempt.committed or (completes and self._transaction_used):
            raise RuntimeError(
                "job.transaction() completes the job, so an attempt has only one; give checkpoint=… for steps before it"
            )
        self._transaction_used = self._transaction_used or completes
        async with self._port.transaction(self._attempt, completes=completes) as conn:
            yield conn
            if completes:
                await self._port.complete(self._attempt, conn, None)
            else:
                await self.save_checkpoint(checkpoint, conn)

    async def complete(self, conn: AsyncConn, result: Any = None) -> None:
        """Settle this job as succeeded inside *your* open transaction. It counts if, and only if, that transaction commits.

        `conn` belongs to asyncpg, or is psycopg's AsyncConnection, SQLAlchemy's AsyncConnection or AsyncSession. `result` is
        JSON of at most 8 KiB. Raises StaleToken if the lease was lost; roll back then.
        """
        await self._port.complete(self._attempt, conn, None if result is None else encode(result, what="result"))
        await self._port.mark(self._attempt, "completing")

    async def guard(self, conn: AsyncConn, resource: str) -> None:
        """Order effects on `resource` by fence token, in the transaction open on `conn`, of any supported driver.

        Raises StaleToken if a later claim has guarded the resource already. Guards order effects; they don't deduplicate them.
        """
        check_types(resource=resource)
        await self._port.guard(self._attempt, conn, resource)

    async def save_checkpoint(self, value: Any, conn: AsyncConn | None = None) -> None:
        """Keep a JSON value of at most 64 KiB for the next attempt. With `conn`, it commits with your own transaction.

        Raises StaleToken if the lease was lost, InvalidPayload if the value isn't JSON.
        """
        text = encode(value, what="checkpoint")
        await self._port.save_checkpoint(self._attempt, text, conn)
        self._attempt.checkpoint = text

    async def report_progress(self, done: float, note: str | None = None) -> None:
        """Show the progress, from 0 to 1, with a note of at most 500 characters. Raises StaleToken if the lease was lost."""
        check_progress(done, note)
        await self._port.report_progress(self._attempt, done, note)


class SyncJob(JobFacts[P]):
    """One attempt, as a plain `def` handler sees it in its thread. It has the methods of `Job`, and they block."""

    __slots__ = ("_job",)

    def __init__(self, attempt: Attempt, port: JobPort, payload: P) -> None:
        super().__init__(attempt, port, payload)
        self._job: Any = Job(attempt, port, payload)

    @contextmanager
    def transaction(self, *, checkpoint: Any = KEEP) -> Iterator[psycopg.Connection[Any]]:
        """Run a transaction in which the effect and this job's completion commit together, or neither does.

        Yields a psycopg connection at READ COMMITTED; needs `pip install 'rota[psycopg]'`. In all else it is `Job.transaction`.
        """
        with _BlockingContext(self._job.transaction(checkpoint=checkpoint)) as conn:
            yield conn

    def complete(self, conn: SyncConn, result: Any = None) -> None:
        """Settle this job as succeeded inside *your* open transaction. It counts if, and only if, that transaction commits.

        `conn` is psycopg's, SQLAlchemy's Connection or Session, or Django's. `result` is JSON of at most 8 KiB.
        Raises StaleToken if the lease was lost; roll back then.
        """
        _run_without_suspending(self._job.complete(conn, result))

    def guard(self, conn: SyncConn, resource: str) -> None:
        """Order effects on `resource` by fence token, in the transaction open on `conn`. Raises StaleToken as `Job.guard` does."""
        _run_without_suspending(self._job.guard(conn, resource))

    def save_checkpoint(self, value: Any, conn: SyncConn | None = None) -> None:
        """Keep a JSON value of at most 64 KiB for the next attempt. With `conn`, it commits with your own transaction.

        Raises StaleToken if the lease was lost, InvalidPayload if the value isn't JSON.
        """
        _run_without_suspending(self._job.save_checkpoint(value, conn))

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Show the progress, from 0 to 1, with a note of at most 500 characters. Raises StaleToken if the lease was lost."""
        _run_without_suspending(self._job.report_progress(done, note))

    def wait_for_stop(self, timeout: timedelta) -> bool:
        """Sleep for `timeout`, or until this attempt should end if that is sooner; return whether it should end."""
        check_types(timeout=timeout)
        flag = self._attempt.stop_flag
        return flag is not None and flag.wait(timeout.total_seconds())


class _BlockingContext:
    """The blocking form of an asynchronous context manager that never suspends."""

    def __init__(self, manager: AbstractAsyncContextManager[Any]) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return _run_without_suspending(self._manager.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppressed: bool | None = _run_without_suspending(self._manager.__aexit__(kind, error, traceback))
        return suppressed


def _run_without_suspending(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as returned:
        return returned.value
    work.close()
    raise AssertionError("a blocking port suspended")
