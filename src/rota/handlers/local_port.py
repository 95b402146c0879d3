"""The port of jobs whose handlers run in the daemon, on its loop or in its threads."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rota.db import queries
from rota.db.pool import connection
from rota.db.salvage import TRANSIENT
from rota.handlers.database_port import NO_DATABASE, AsyncpgSession, DatabasePort, PsycopgSession, fetch_blocking
from rota.handlers.job import Job, JobFacts, SyncJob
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from rota.db.blocking import BlockingPool, Login
    from rota.db.pool import Pool
    from rota.domain.job import NodeId
    from rota.errors import StaleToken
    from rota.handlers.attempt import Attempt


def local_job(attempt: Attempt, environment: Environment, payload: Any) -> Job[Any]:
    """Return the job for an `async def` handler on the daemon's loop."""
    return Job(attempt, LocalPort(environment), payload)


def local_sync_job(
    attempt: Attempt, environment: Environment, payload: Any, loop: asyncio.AbstractEventLoop
) -> SyncJob[Any]:
    """Return the job for a plain `def` handler in a thread of the daemon."""
    return SyncJob(attempt, BlockingLocalPort(environment, loop), payload)


@dataclass(slots=True, kw_only=True)
class Environment:
    """The connections, threads and settings that attempts on this node share."""

    node: NodeId
    installation_id: str
    pool: Pool
    handler_pool: Pool
    """Connections for the transactions of `async def` handlers."""
    app_reference: str | None
    """`module:app`, from which a handler's own process imports the app."""
    state: Any = None
    threads: Callable[[str], Any] = field(default=lambda _: None)
    """queue -> the thread pool of its plain `def` handlers."""
    blocking: BlockingPool | None = None
    """Connections for the transactions of plain `def` handlers."""
    login: Login | None = None
    """How a handler's own process connects."""
    log: dict[str, str] = field(default_factory=lambda: {"level": "info", "format": "json"})
    stale_write: Callable[[Attempt, str], None] = field(default=lambda _attempt, _what: None)
    """Counts a write that was refused as stale; the text names the write."""
    job: Callable[[Attempt, Environment, Any], Job[Any]] = local_job
    sync_job: Callable[[Attempt, Environment, Any, asyncio.AbstractEventLoop], SyncJob[Any]] = local_sync_job


class NodePort:
    """Base of the ports in the process that holds the Environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.node = environment.node
        self.installation_id = environment.installation_id
        self.state = environment.state


class LocalPort(NodePort, DatabasePort):
    """For `async def` handlers on the daemon's loop."""

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction on a connection of the handlers' pool."""
        async with (
            self.environment.handler_pool.acquire() as conn,
            self.run_transaction(AsyncpgSession(conn), attempt, completes=completes),
        ):
            yield conn

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write the checkpoint, on `conn` if it isn't None. Raises StaleToken if the lease was lost."""
        if conn is not None:
            await super().save_checkpoint(attempt, text, conn)
            return
        async with connection(self.environment.pool) as own:
            await super().save_checkpoint(attempt, text, own)

    async def report_progress(self, attempt: Attempt, done: float, note: str | None) -> None:
        """Write the progress. Raises StaleToken if the lease was lost."""
        claim = attempt.claim
        async with connection(self.environment.pool) as own:
            is_current = await queries.report_progress(
                own, node=self.node, job_id=claim.job_id, fence_token=claim.fence_token, progress=done, note=note
            )
        if not is_current:
            raise self.stale_token(attempt, "progress")

    def stale_token(self, attempt: Attempt, what: str) -> StaleToken:
        """Count the refused write, and return its error."""
        self.environment.stale_write(attempt, what)
        return super().stale_token(attempt, what)

    async def was_committed(self, attempt: Attempt) -> bool:
        """Ask the ledger whether a COMMIT whose answer was lost has settled the job; give up after one lease.

        Giving up does no harm: the settlement that follows is fenced, and asks the ledger too.
        """
        claim, pause = attempt.claim, 0.05
        deadline = boottime() + attempt.lease
        while boottime() < deadline:
            try:
                async with connection(self.environment.pool) as own:
                    findings = await queries.examine_unsettled(
                        own, node=self.node, attempts=[(claim.job_id, claim.fence_token)]
                    )
            except TRANSIENT:
                findings = {}
            if (finding := findings.get(claim.fence_token, "held")) != "held":
                return finding == "settled"
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
        return False


class BlockingLocalPort(LocalPort):
    """For plain `def` handlers in the daemon's threads: what needs the daemon's own pool runs on its loop."""

    fetch = staticmethod(fetch_blocking)

    def __init__(self, environment: Environment, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(environment)
        self._loop = loop
        self._on_loop = LocalPort(environment)

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction on a psycopg connection."""
        if self.environment.blocking is None:
            raise RuntimeError(NO_DATABASE)
        with self.environment.blocking.connection() as conn:
            async with self.run_transaction(PsycopgSession(conn), attempt, completes=completes):
                yield conn

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write the checkpoint, on `conn` if it isn't None. Raises StaleToken if the lease was lost."""
        if conn is None:
            self._wait(self._on_loop.save_checkpoint(attempt, text, None))
        else:
            await super().save_checkpoint(attempt, text, conn)

    async def report_progress(self, attempt: Attempt, done: float, note: str | None) -> None:
        """Write the progress. Raises StaleToken if the lease was lost."""
        self._wait(self._on_loop.report_progress(attempt, done, note))

    async def was_committed(self, attempt: Attempt) -> bool:
        """Return whether a COMMIT whose answer was lost has settled the job."""
        return bool(self._wait(self._on_loop.was_committed(attempt)))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def attempt_and_environment(job: JobFacts[Any]) -> tuple[Attempt, Environment]:
    """Return the attempt and the environment of a job in this process. Handlers of apps must not use this."""
    return job._attempt, cast("NodePort", job._port).environment  # noqa: SLF001
