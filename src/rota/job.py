"""What a handler sees of its attempt."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import asyncpg

from rota.clock import boottime
from rota.db import queries
from rota.db.pool import LOST, TRANSIENT, connection
from rota.domain.job import FenceToken, NodeId, idempotency_key
from rota.errors import StaleToken
from rota.payload import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime, timedelta

    from rota.attempt import Attempt
    from rota.db.pool import Connection, Pool
    from rota.domain.outcome import StopReason

P = TypeVar("P")

STALE = "RT001"


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
    stale_write: Callable[[Attempt, str], None] = field(default=lambda _attempt, _what: None)


class _Keep:
    """Stands for: no checkpoint given."""


_KEEP = _Keep()


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


class Job(JobFacts[P]):
    """One attempt, as an `async def` handler sees it."""

    __slots__ = ()

    @asynccontextmanager
    async def transaction(self, *, checkpoint: Any = _KEEP) -> AsyncIterator[Connection]:
        """Run a transaction in which the effect and this job's completion commit together, or neither does.

        Yields an asyncpg connection at READ COMMITTED. Once per attempt, unless a `checkpoint` (JSON, at most 64 KiB) is given:
        then the effect and the checkpoint commit together, and the job goes on.
        Raises StaleToken, with nothing committed, when the lease was lost. The job's row is touched in the last statement only.
        """
        completes = isinstance(checkpoint, _Keep)
        if self._attempt.committed or (completes and self._transaction_used):
            raise RuntimeError(
                "job.transaction() completes the job, so an attempt has only one; give checkpoint=… for steps before it"
            )
        self._transaction_used = self._transaction_used or completes
        async with self._environment.handler_pool.acquire() as conn:
            transaction = conn.transaction(isolation="read_committed")
            try:
                await transaction.start()
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
                await transaction.commit()
            except LOST:
                # Still marked while we ask: until then, a row that has gone says nothing about a loss.
                if not completes or not await self._committed():
                    self._attempt.committing = False
                    raise
            except BaseException:
                self._attempt.committing = False
                raise
            self._attempt.committed = completes

    async def complete(self, conn: Connection, result: Any = None) -> None:
        """Settle this job as succeeded inside *your* open transaction: it counts when, and only when, that commits.

        Raises StaleToken when the lease was lost; roll back then.
        """
        await self._complete(conn, None if result is None else encode(result, what="result"))
        self._attempt.completing = True

    async def guard(self, conn: Connection, resource: str) -> None:
        """Order effects on `resource` by fence token, in the transaction open on `conn`.

        Raises StaleToken when a later claim has been here: this attempt is a straggler. It orders, it doesn't deduplicate.
        """
        try:
            await queries.guard_resource(conn, resource=resource, fence_token=self.fence_token)
        except asyncpg.PostgresError as error:
            raise self._translated(error, "guard") from error

    async def save_checkpoint(self, value: Any, conn: Connection | None = None) -> None:
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

    async def _save(self, conn: Connection, text: str) -> None:
        ours = await queries.save_checkpoint(
            conn, node=self._environment.node, job_id=self.job_id, fence_token=self.fence_token, checkpoint=text
        )
        if not ours:
            raise self._stale("checkpoint")

    async def _complete(self, conn: Connection, result: str | None) -> None:
        try:
            await queries.complete_job(conn, job_id=self.job_id, fence_token=self.fence_token, result=result)
        except asyncpg.PostgresError as error:
            raise self._translated(error, "complete") from error

    async def _committed(self) -> bool:
        """Ask whether the COMMIT whose answer was lost has happened, for as long as a lease lasts.

        An answer that never comes is no harm: the settlement that follows is fenced, and asks the ledger, too.
        """
        claim, pause = self._attempt.claim, 0.05
        deadline = boottime() + self._attempt.lease
        while boottime() < deadline:
            try:
                async with connection(self._environment.pool) as own:
                    found = await queries.examine_unsettled(
                        own, node=self._environment.node, attempts=[(claim.job_id, claim.fence_token)]
                    )
            except TRANSIENT:
                found = {}
            if (finding := found.get(claim.fence_token, "held")) != "held":
                return finding == "settled"
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
        return False

    def _translated(self, error: asyncpg.PostgresError, what: str) -> BaseException:
        return self._stale(what) if error.sqlstate == STALE else error

    def _stale(self, what: str) -> StaleToken:
        self._environment.stale_write(self._attempt, what)
        return StaleToken(
            f"job {self.job_id}: the claim with token {self.fence_token} is no longer the current one; "
            f"its {what} was refused and nothing was written"
        )


class SyncJob(JobFacts[P]):
    """One attempt, as a plain `def` handler sees it in its thread: the same names, blocking."""

    __slots__ = ("_loop",)

    def __init__(self, attempt: Attempt, environment: Environment, payload: P, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(attempt, environment, payload)
        self._loop = loop

    def save_checkpoint(self, value: Any) -> None:
        """Keep a JSON value of at most 64 KiB for the next attempt. Raises StaleToken when the lease was lost."""
        self._wait(Job(self._attempt, self._environment, self.payload).save_checkpoint(value))

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come, from 0 to 1. Raises StaleToken when the lease was lost."""
        self._wait(Job(self._attempt, self._environment, self.payload).report_progress(done, note))

    def wait_for_stop(self, timeout: timedelta) -> bool:
        """Sleep for `timeout`, or less when this attempt should end; return whether it should."""
        flag = self._attempt.stop_flag
        return flag is not None and flag.wait(timeout.total_seconds())

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _roll_back(conn: Connection, transaction: asyncpg.transaction.Transaction) -> None:
    try:
        await transaction.rollback()
    except LOST:
        # The connection is gone, and the transaction with it; or an interruption fell into BEGIN, and nobody knows whether it
        # has begun. Such a connection doesn't go back to the pool.
        with suppress(*LOST):
            conn.terminate()
