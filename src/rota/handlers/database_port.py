"""The base of the ports with a database: fenced statements, and the commit of job.transaction()."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from rota.db import drivers
from rota.db.salvage import LOST
from rota.db.sessions import STATEMENT_SECONDS, format_milliseconds
from rota.errors import Refused, StaleToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import psycopg

    from rota.db.pool import Connection
    from rota.domain.job import NodeId
    from rota.handlers.attempt import Attempt
    from rota.handlers.job import Mark

NO_DATABASE = "job.transaction() needs the daemon's database, and this job runs without a daemon"


async def fetch_blocking(conn: Any, query: drivers.Query, *arguments: Any, caller: str) -> Sequence[Any] | None:
    """Run a query on a blocking connection, without suspending."""
    return drivers.fetch_sync(conn, query, *arguments, caller=caller)


class AsyncpgSession:
    """The session of an `async def` handler."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self._transaction = conn.transaction(isolation="read_committed")

    async def begin(self) -> None:
        """Begin at READ COMMITTED."""
        await self._transaction.start()

    async def commit(self, *, within: float) -> None:
        """Commit. Raises TimeoutError and closes the connection if no answer comes `within` seconds."""
        try:
            async with asyncio.timeout(within):
                await self._transaction.commit()
        except (TimeoutError, asyncio.CancelledError):
            self._close()
            raise

    async def roll_back(self) -> None:
        """Roll back, or close a connection that can't."""
        try:
            # Limited: over a cut link, the slot of an interrupted handler would stay taken for a quarter of an hour.
            async with asyncio.timeout(STATEMENT_SECONDS):
                await self._transaction.rollback()
        except LOST:
            # An interruption during BEGIN also ends here: the transaction may be open, so the connection can't be reused.
            self._close()
        except asyncio.CancelledError:
            # Python up to 3.11.2 raises this instead of TimeoutError if the task was cancelled before.
            self._close()
            raise

    def is_connection_lost(self, error: BaseException) -> bool:
        """Return whether the error of a commit leaves open what became of the transaction."""
        return isinstance(error, LOST)

    def _close(self) -> None:
        with suppress(*LOST):
            self.conn.terminate()


class PsycopgSession:
    """The session of a plain `def` handler. It blocks."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    async def begin(self) -> None:
        """Begin at READ COMMITTED."""
        self.conn.execute("begin isolation level read committed")

    async def commit(self, *, within: float) -> None:
        """Commit. TCP timeouts limit the wait, not `within`."""
        del within
        self.conn.execute("commit")

    async def roll_back(self) -> None:
        """Roll back unless the connection is closed."""
        if not self.conn.closed:
            self.conn.execute("rollback")

    def is_connection_lost(self, error: BaseException) -> bool:
        """Return whether the error of a commit leaves open what became of the transaction."""
        from psycopg import OperationalError  # noqa: PLC0415  optional, and installed if there is a session

        return isinstance(error, OperationalError) and self.conn.closed


Session = AsyncpgSession | PsycopgSession


class DatabasePort:
    """Base of the ports with a database."""

    node: NodeId
    fetch: ClassVar[Callable[..., Awaitable[Sequence[Any] | None]]] = staticmethod(drivers.fetch)
    """Runs a query on the handler's connection: `drivers.fetch` or `fetch_blocking`."""

    async def complete(self, attempt: Attempt, conn: Any, result: str | None) -> None:
        """Settle the job as succeeded in the transaction open on `conn`."""
        claim = attempt.claim
        await self._fetch_fenced(attempt, "complete", conn, "complete_job", claim.job_id, claim.fence_token, result)

    async def mark(self, attempt: Attempt, mark: Mark, *, value: bool = True) -> None:
        """Set or remove a mark of the attempt."""
        setattr(attempt, mark, value)

    async def guard(self, attempt: Attempt, conn: Any, resource: str) -> None:
        """Raise StaleToken if a later claim has guarded the resource."""
        await self._fetch_fenced(attempt, "guard", conn, "guard_resource", resource, attempt.claim.fence_token)

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write the checkpoint on `conn`. Raises StaleToken if the lease was lost."""
        claim = attempt.claim
        arguments = self.node, claim.job_id, claim.fence_token, text
        if await self.fetch(conn, "save_checkpoint", *arguments, caller="job.save_checkpoint") is None:
            raise self.stale_token(attempt, "checkpoint")

    def stale_token(self, attempt: Attempt, what: str) -> StaleToken:
        """Return the error of a write that was refused because another claim has replaced this attempt's."""
        claim = attempt.claim
        return StaleToken(
            f"job {claim.job_id}: the claim with token {claim.fence_token} is no longer the current one; "
            f"its {what} was refused and nothing was written"
        )

    async def was_committed(self, attempt: Attempt) -> bool:
        """Return whether a COMMIT whose answer was lost has settled the job."""
        raise NotImplementedError

    @asynccontextmanager
    async def run_transaction(self, session: Session, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run the body of job.transaction() between BEGIN and COMMIT, and yield the connection."""
        try:
            await session.begin()
            # The session's own limit fits the daemon's lease; a job with another lease needs another limit.
            if attempt.claim.lease is not None:
                limit = format_milliseconds(attempt.claim.lease)
                await self.fetch(session.conn, "limit_idling", limit, caller="job.transaction")
            yield session.conn
            if completes:
                # Before COMMIT is sent: the heartbeat must not take the job's missing row for a lost lease.
                await self.mark(attempt, "committing")
        except BaseException:
            await session.roll_back()
            raise
        try:
            await session.commit(within=attempt.lease)
        except BaseException as error:
            if completes:
                # Keep the mark while the database is asked: until then, a missing row does not prove a loss.
                if session.is_connection_lost(error) and await self.was_committed(attempt):
                    await self.mark(attempt, "committed")
                    return
                await self.mark(attempt, "committing", value=False)
            raise
        if completes:
            await self.mark(attempt, "committed")

    async def _fetch_fenced(
        self, attempt: Attempt, what: str, conn: Any, query: drivers.Query, *arguments: Any
    ) -> None:
        try:
            await self.fetch(conn, query, *arguments, caller=f"job.{what}")
        except Refused as error:
            if error.sqlstate == drivers.STALE:
                raise self.stale_token(attempt, what) from None
            raise error from None
