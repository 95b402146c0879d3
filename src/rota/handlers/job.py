"""What a handler sees of its attempt."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rota.db import drivers, queries
from rota.db.pool import connection
from rota.db.salvage import LOST, TRANSIENT
from rota.db.sessions import STATEMENT_SECONDS, format_milliseconds
from rota.domain.job import FenceToken, NodeId, idempotency_key
from rota.domain.payload import encode
from rota.domain.validation import check_progress, check_types
from rota.errors import Refused, StaleToken
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import datetime, timedelta

    import asyncpg
    import psycopg

    from rota.db.blocking import BlockingPool, Login
    from rota.db.drivers import AsyncConn, SyncConn
    from rota.db.pool import Connection, Pool
    from rota.domain.outcome import StopReason
    from rota.handlers.attempt import Attempt

P = TypeVar("P")


@dataclass(slots=True, kw_only=True)
class Environment:
    """What attempts on this node can reach."""

    node: NodeId
    installation_id: str
    pool: Pool
    handler_pool: Pool
    app_reference: str | None
    state: Any = None
    threads: Callable[[str], Any] = field(default=lambda _: None)
    """queue -> the thread pool of its plain `def` handlers."""
    blocking: BlockingPool | None = None
    """Where the transactions of plain `def` handlers run."""
    login: Login | None = None
    """What a handler in a process of its own connects with."""
    log: dict[str, str] = field(default_factory=lambda: {"level": "info", "format": "json"})
    stale_write: Callable[[Attempt, str], None] = field(default=lambda _attempt, _what: None)
    job: type[Job[Any]] = field(default_factory=lambda: Job)
    sync_job: type[SyncJob[Any]] = field(default_factory=lambda: SyncJob)


class _Keep:
    """Stands for: no checkpoint given."""


KEEP: Any = _Keep()


def completes_with(checkpoint: Any) -> bool:
    """Return whether a transaction with that checkpoint completes its job: with none, it does."""
    return isinstance(checkpoint, _Keep)


def refuse_after_the_last(*, completes: bool, used: bool, committed: bool) -> None:
    """Raise RuntimeError for a transaction after the one in which the job is completed, or for a second one that would do that."""
    if committed or (completes and used):
        raise RuntimeError(
            "job.transaction() completes the job, so an attempt has only one; give checkpoint=… for steps before it"
        )


def stale_token(job_id: int, fence_token: int, what: str) -> StaleToken:
    """Return the error of an attempt whose claim is somebody else's by now, or nobody's."""
    return StaleToken(
        f"job {job_id}: the claim with token {fence_token} is no longer the current one; "
        f"its {what} was refused and nothing was written"
    )


NO_DATABASE = "job.transaction() needs the daemon's database, and this job runs without a daemon"


class JobFacts(Generic[P]):
    """What `Job` and `SyncJob` have in common: the facts of this attempt."""

    __slots__ = ("_attempt", "_environment", "_transaction_used", "payload")

    def __init__(self, attempt: Attempt, environment: Environment, payload: P) -> None:
        self._attempt = attempt
        self._environment = environment
        self._transaction_used = False
        self.payload = payload

    @property
    def job_id(self) -> int:
        """The job's number, the same for all attempts and redrives."""
        return self._attempt.claim.job_id

    @property
    def handler(self) -> str:
        """The name under which this handler was called."""
        return self._attempt.claim.handler

    @property
    def queue(self) -> str:
        """The queue that the job came through."""
        return self._attempt.claim.queue

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._attempt.claim.attempt

    @property
    def fence_token(self) -> FenceToken:
        """A number larger for every later claim in this installation. Show it where effects must not be overtaken."""
        return self._attempt.claim.fence_token

    @property
    def scheduled_for(self) -> datetime:
        """The instant this was first due, in UTC; retries don't change it."""
        claim = self._attempt.claim
        return claim.scheduled_for or claim.run_at

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this job: hand it to whatever must not do the work twice."""
        return idempotency_key(self._attempt.claim, self._environment.installation_id)

    @property
    def schedule_id(self) -> int | None:
        """The schedule whose fire this is, if it is one."""
        return self._attempt.claim.schedule_id

    @property
    def schedule(self) -> str | None:
        """The name of the schedule whose fire this is, if it is one."""
        return self._attempt.claim.schedule

    @property
    def checkpoint(self) -> Any:
        """What an earlier attempt, or this one, last saved; None at first."""
        text = self._attempt.checkpoint
        return None if text is None else json.loads(text)

    @property
    def meta(self) -> dict[str, Any]:
        """The job's meta object; empty when it has none."""
        meta = self._attempt.claim.meta
        return {} if meta is None else json.loads(meta)

    @property
    def state(self) -> Any:
        """What the app's lifespan yielded."""
        return self._environment.state

    @property
    def stop_requested(self) -> bool:
        """True once this attempt should end: see `stop_reason`."""
        return self._attempt.interruption is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """'cancel', 'drain', 'timeout', 'lease_lost', or None while nobody wants it to stop."""
        return self._attempt.stop_reason

    @property
    def _own_idling(self) -> str | None:
        """For how long a transaction may idle where the job has a lease of its own; the session has the daemon's."""
        lease = self._attempt.claim.lease
        return None if lease is None else format_milliseconds(lease)

    def _first_transaction(self, *, completes: bool) -> None:
        refuse_after_the_last(completes=completes, used=self._transaction_used, committed=self._attempt.committed)
        self._transaction_used = self._transaction_used or completes

    def _translated(self, error: Refused, what: str) -> Exception:
        return self._stale(what) if error.sqlstate == drivers.STALE else error

    def _stale(self, what: str) -> StaleToken:
        self._environment.stale_write(self._attempt, what)
        return stale_token(self.job_id, self.fence_token, what)


class Job(JobFacts[P]):
    """One attempt, as an `async def` handler sees it."""

    __slots__ = ()

    @asynccontextmanager
    async def transaction(self, *, checkpoint: Any = KEEP) -> AsyncIterator[Connection]:
        """Run a transaction in which the effect and this job's completion commit together, or neither does.

        Yields an asyncpg connection at READ COMMITTED. Once per attempt, unless a `checkpoint` (JSON, at most 64 KiB) is given:
        then the effect and the checkpoint commit together, and the job goes on.
        Raises StaleToken, with nothing committed, when the lease was lost. The job's row is touched in the last statement only.
        """
        completes = completes_with(checkpoint)
        self._first_transaction(completes=completes)
        async with self._environment.handler_pool.acquire() as conn:
            transaction = conn.transaction(isolation="read_committed")
            try:
                await transaction.start()
                if (limit := self._own_idling) is not None:
                    await drivers.fetch(conn, "limit_idling", limit, caller="job.transaction")
                yield conn
                if completes:
                    await self._complete(conn, None)
                else:
                    await self.save_checkpoint(checkpoint, conn)
            except BaseException:
                await _roll_back(conn, transaction)
                raise
            # Marked before COMMIT is sent: a row that has gone by the next heartbeat is then no loss.
            self._attempt.committing = completes
            try:
                await _commit(conn, transaction, within=self._attempt.lease)
            except LOST:
                # Still marked while we ask: until then, a row that has gone says nothing about a loss.
                if not completes or not await _was_committed(self._attempt, self._environment):
                    self._attempt.committing = False
                    raise
            except BaseException:
                self._attempt.committing = False
                raise
            self._attempt.committed = completes

    async def complete(self, conn: AsyncConn, result: Any = None) -> None:
        """Settle this job as succeeded inside *your* open transaction: it counts when, and only when, that commits.

        `conn` is asyncpg's, psycopg's AsyncConnection, SQLAlchemy's AsyncConnection or AsyncSession; `result` is JSON, at most
        8 KiB. Raises StaleToken when the lease was lost; roll back then.
        """
        await self._complete(conn, None if result is None else encode(result, what="result"))
        self._attempt.completing = True

    async def guard(self, conn: AsyncConn, resource: str) -> None:
        """Order effects on `resource` by fence token, in the transaction open on `conn`, of whatever driver.

        Raises StaleToken when a later claim has been here: this attempt is a straggler. It orders, it doesn't deduplicate.
        """
        check_types(resource=resource)
        try:
            await drivers.fetch(conn, "guard_resource", resource, self.fence_token, caller="job.guard")
        except Refused as error:
            raise self._translated(error, "guard") from None

    async def save_checkpoint(self, value: Any, conn: AsyncConn | None = None) -> None:
        """Keep a JSON value of at most 64 KiB for the next attempt; on `conn`, together with your own transaction.

        Raises StaleToken when the lease was lost, InvalidPayload when it isn't JSON.
        """
        text = encode(value, what="checkpoint")
        if conn is None:
            async with connection(self._environment.pool) as own:
                await self._save(own, text)
        else:
            await self._save(conn, text)
        self._attempt.checkpoint = text

    async def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come, from 0 to 1, with a note of at most 500 characters. Raises StaleToken if the lease is lost."""
        check_progress(done, note)
        async with connection(self._environment.pool) as own:
            ours = await queries.report_progress(
                own,
                node=self._environment.node,
                job_id=self.job_id,
                fence_token=self.fence_token,
                progress=done,
                note=note,
            )
        if not ours:
            raise self._stale("progress")

    async def _save(self, conn: AsyncConn, text: str) -> None:
        claim, node = self._attempt.claim, self._environment.node
        saved = await drivers.fetch(
            conn, "save_checkpoint", node, claim.job_id, claim.fence_token, text, caller="job.save_checkpoint"
        )
        if saved is None:
            raise self._stale("checkpoint")

    async def _complete(self, conn: AsyncConn, result: str | None) -> None:
        try:
            await drivers.fetch(conn, "complete_job", self.job_id, self.fence_token, result, caller="job.complete")
        except Refused as error:
            raise self._translated(error, "complete") from None


class SyncJob(JobFacts[P]):
    """One attempt, as a plain `def` handler sees it in its thread: the same names, blocking."""

    __slots__ = ("_loop",)

    def __init__(self, attempt: Attempt, environment: Environment, payload: P, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(attempt, environment, payload)
        self._loop = loop

    @contextmanager
    def transaction(self, *, checkpoint: Any = KEEP) -> Iterator[psycopg.Connection[Any]]:
        """Run a transaction in which the effect and this job's completion commit together, or neither does.

        Yields a psycopg connection at READ COMMITTED; needs `pip install 'rota[psycopg]'`. All else is as with `Job.transaction`.
        """
        completes = completes_with(checkpoint)
        self._first_transaction(completes=completes)
        if self._environment.blocking is None:
            raise RuntimeError(NO_DATABASE)
        with self._environment.blocking.connection() as conn:
            from psycopg import OperationalError  # noqa: PLC0415  optional, and here we have it

            conn.execute("begin isolation level read committed")
            try:
                if (limit := self._own_idling) is not None:
                    drivers.fetch_sync(conn, "limit_idling", limit, caller="job.transaction")
                yield conn
                if completes:
                    self._complete(conn, None)
                else:
                    self.save_checkpoint(checkpoint, conn)
            except BaseException:
                if not conn.closed:
                    conn.execute("rollback")
                raise
            # Marked before COMMIT is sent: a row that has gone by the next heartbeat is then no loss.
            self._attempt.committing = completes
            try:
                conn.execute("commit")
            except OperationalError:
                # Still marked while we ask: until then, a row that has gone says nothing about a loss.
                if not (completes and conn.closed and self._wait(_was_committed(self._attempt, self._environment))):
                    self._attempt.committing = False
                    raise
            except BaseException:
                self._attempt.committing = False
                raise
            self._attempt.committed = completes

    def complete(self, conn: SyncConn, result: Any = None) -> None:
        """Settle this job as succeeded inside *your* open transaction: it counts when, and only when, that commits.

        `conn` is psycopg's, SQLAlchemy's Connection or Session, or Django's; `result` is JSON, at most 8 KiB.
        Raises StaleToken when the lease was lost; roll back then.
        """
        self._complete(conn, None if result is None else encode(result, what="result"))
        self._attempt.completing = True

    def guard(self, conn: SyncConn, resource: str) -> None:
        """Order effects on `resource` by fence token, in the transaction open on `conn`. Raises StaleToken for a straggler."""
        check_types(resource=resource)
        try:
            drivers.fetch_sync(conn, "guard_resource", resource, self.fence_token, caller="job.guard")
        except Refused as error:
            raise self._translated(error, "guard") from None

    def save_checkpoint(self, value: Any, conn: SyncConn | None = None) -> None:
        """Keep a JSON value of at most 64 KiB for the next attempt; on `conn`, together with your own transaction.

        Raises StaleToken when the lease was lost, InvalidPayload when it isn't JSON.
        """
        if conn is None:
            self._wait(self._as_job().save_checkpoint(value))
            return
        text, claim = encode(value, what="checkpoint"), self._attempt.claim
        saved = drivers.fetch_sync(
            conn,
            "save_checkpoint",
            self._environment.node,
            claim.job_id,
            claim.fence_token,
            text,
            caller="job.save_checkpoint",
        )
        if saved is None:
            raise self._stale("checkpoint")
        self._attempt.checkpoint = text

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come, from 0 to 1. Raises StaleToken when the lease was lost."""
        self._wait(self._as_job().report_progress(done, note))

    def wait_for_stop(self, timeout: timedelta) -> bool:
        """Sleep for `timeout`, or less when this attempt should end; return whether it should."""
        check_types(timeout=timeout)
        flag = self._attempt.stop_flag
        return flag is not None and flag.wait(timeout.total_seconds())

    def _as_job(self) -> Job[P]:
        return self._environment.job(self._attempt, self._environment, self.payload)

    def _complete(self, conn: SyncConn, result: str | None) -> None:
        try:
            drivers.fetch_sync(conn, "complete_job", self.job_id, self.fence_token, result, caller="job.complete")
        except Refused as error:
            raise self._translated(error, "complete") from None

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def inside(job: JobFacts[Any]) -> tuple[Attempt, Environment]:
    """Return what a job stands on: for the ways of calling handlers, not for handlers."""
    return job._attempt, job._environment  # noqa: SLF001


async def _was_committed(attempt: Attempt, environment: Environment) -> bool:
    """Ask whether the COMMIT whose answer was lost has happened, for as long as a lease lasts.

    An answer that never comes is no harm: the settlement that follows is fenced, and asks the ledger, too.
    """
    claim, pause = attempt.claim, 0.05
    deadline = boottime() + attempt.lease
    while boottime() < deadline:
        try:
            async with connection(environment.pool) as own:
                found = await queries.examine_unsettled(
                    own, node=environment.node, attempts=[(claim.job_id, claim.fence_token)]
                )
        except TRANSIENT:
            found = {}
        if (finding := found.get(claim.fence_token, "held")) != "held":
            return finding == "settled"
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2.0)
    return False


async def _commit(conn: Connection, transaction: asyncpg.transaction.Transaction, *, within: float) -> None:
    """Commit. Raises TimeoutError where no answer has come when the lease ends: what became of it, the database is asked."""
    try:
        async with asyncio.timeout(within):
            await transaction.commit()
    except (TimeoutError, asyncio.CancelledError):
        _hang_up(conn)
        raise


async def _roll_back(conn: Connection, transaction: asyncpg.transaction.Transaction) -> None:
    try:
        # Without an end to it, a cut link would keep the slot of a handler that was told to stop for a quarter of an hour.
        async with asyncio.timeout(STATEMENT_SECONDS):
            await transaction.rollback()
    except LOST:
        # The connection is gone, and the transaction with it; or an interruption fell into BEGIN, and nobody knows whether it
        # has begun. Such a connection doesn't go back to the pool.
        _hang_up(conn)
    except asyncio.CancelledError:
        # So ends the time above in Python 3.11.2 and earlier, where the handler was told to stop before.
        _hang_up(conn)
        raise


def _hang_up(conn: Connection) -> None:
    with suppress(*LOST):
        conn.terminate()
