"""Write outcomes to the database, in fenced statements: a claim that was lost writes nothing.

Each statement carries all outcomes that were queued while the previous one ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import asyncpg

from rota.db import queries
from rota.db.pool import Connection, Pool, connection, is_connection_lost
from rota.db.salvage import ChangeIgnored, Fault, fault_of, salvage
from rota.domain.outcome import Committed, Held, LeaseLost, Outcome, Succeeded
from rota.lifecycle.retry_planner import decide
from rota.lifecycle.settlement_rows import report_settlement, settlement_row, simpler_outcome
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence
    from datetime import timedelta

    from rota.domain.job import FenceToken, NodeId, Terms
    from rota.domain.settlement import Settlement
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.running import Running
    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

MAX_BATCH = 1000
"""Most settlements in one statement: a larger batch saves little per job and holds its locks longer."""

LOCKED_RETRY_SECONDS = 0.1
"""Pause before a job is tried again whose row another session has locked."""

MAX_IGNORED = 20
"""A job counts as refused if so many settlements in a row changed nothing and its row was not locked afterwards."""

IGNORED_RETRY_SECONDS = 10.0
"""Pause before such a job is tried again."""

MAX_SETTLE_CRASHES = 3
"""After this many crashes on one outcome, its attempt is pending until its lease expires."""

NOTIFY_SECONDS = 0.01
"""At least this long between two notifications of free permits: a notification serialises commits."""

AttemptOutcome = tuple["Attempt", Outcome]

Pending = dict["FenceToken", AttemptOutcome]
"""The outcomes of a batch that are not settled yet."""

Write = Callable[[Connection, Pending, "Sequence[AttemptOutcome]"], "Awaitable[None]"]

SUCCESS_BY_SETTLEMENT = {"bury": False, "cancel": None}
"""The settlements that end a job without success -> False for a failure, None for a cancellation."""


class Settler:
    """Service: writes all queued successes in one statement, and all other outcomes in another."""

    name = "settle"
    interval: timedelta | None = None
    max_backoff_seconds = 1.0
    """Short, because an outcome must be written before its lease ends."""

    def __init__(
        self,
        pool: Pool,
        running: Running,
        telemetry: Telemetry,
        *,
        monitor: ServiceMonitor,
        node: NodeId,
        random: Callable[[], float],
        alert: str | None,
        on_end: Callable[[int, bool | None], None],
        on_permits_free: Callable[[], bool] = lambda: False,
    ) -> None:
        self._monitor = monitor
        self._pool = pool
        self._on_end = on_end
        self._on_permits_free = on_permits_free
        """Called after attempts of limited jobs have been settled. Returns whether to notify other nodes."""
        self._permits_free = False
        self._may_notify_at = 0.0
        self._running = running
        self._telemetry = telemetry
        self._node = node
        self._random = random
        self._alert = alert
        self._queued: list[AttemptOutcome] = []
        self._has_queued = asyncio.Event()
        self._crash: Exception | None = None
        """The error of a bug in writing one outcome, raised once the others of its batch have been written."""

    def add(self, attempt: Attempt, outcome: Outcome) -> None:
        """Queue an outcome, and free the slot if the handler has ended."""
        if attempt.ended_at:
            self._running.free_slot(attempt)
        self._queued.append((attempt, outcome))
        self._has_queued.set()

    def abandon(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that is not to be settled."""
        self._running.remove(attempt, settled=False)

    async def run_once(self) -> None:
        """Wait for outcomes, and write all that are queued."""
        await self._has_queued.wait()
        self._has_queued.clear()
        batch, self._queued = self._queued[:MAX_BATCH], self._queued[MAX_BATCH:]
        if self._queued:
            self._has_queued.set()
        pending = {attempt.claim.fence_token: (attempt, outcome) for attempt, outcome in batch}
        try:
            with self._monitor.waiting_for_database(self.name):
                await self._write(pending)
        except BaseException:
            # An outcome may have been written although its reply was lost. Writing it again finds that its token is settled.
            self._queue_again(pending.values())
            raise

    async def _write(self, pending: Pending) -> None:
        """Write the outcomes, and remove from `pending` each one that is settled."""
        successes, others = [], []
        for token, (attempt, outcome) in list(pending.items()):
            match outcome:
                case Succeeded():
                    successes.append((attempt, outcome))
                case Committed():
                    self._finish_succeeded(pending, [attempt])
                case LeaseLost():
                    self._telemetry.lease_lost(job_id=attempt.claim.job_id, handler=attempt.claim.handler)
                    self._finish(pending, attempt, settled=False)
                case _:
                    others.append(pending[token])
        if not pending and not self._permits_free:
            return
        async with connection(self._pool) as db:
            if successes:
                await self._salvage(db, pending, successes, self._write_successes)
            if others:
                await self._salvage(db, pending, others, self._write_others)
            await self._report_free_permits(db)
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    async def _salvage(self, db: Connection, pending: Pending, batch: Sequence[AttemptOutcome], write: Write) -> None:
        """Write the batch. An outcome that the database refuses is replaced by a simpler one, in the end by a dead letter."""

        async def write_some(some: Sequence[AttemptOutcome]) -> None:
            try:
                await write(db, pending, some)
            except Exception as error:
                if (
                    isinstance(error, asyncpg.PostgresError)
                    or fault_of(error) is not Fault.FATAL
                    or is_connection_lost(db)
                ):
                    raise
                # A bug that may concern one outcome only: write the others one by one.
                if len(some) > 1:
                    for ended in some:
                        await write_some([ended])
                    return
                attempt = some[0][0]
                attempt.settle_crashes += 1
                if attempt.settle_crashes < MAX_SETTLE_CRASHES:
                    self._crash = error  # raised by _write(); this outcome stays in `pending`
                else:
                    await refuse(some[0], error)

        async def refuse(ended: AttemptOutcome, error: Exception) -> None:
            attempt, outcome = ended
            kind = type(error).__name__
            self._telemetry.settlement_rejected(job_id=attempt.claim.job_id, kind=kind)
            if (simpler := simpler_outcome(outcome, kind)) is not None:
                del pending[attempt.claim.fence_token]
                self._queue_again([(attempt, simpler)])
            else:
                # Not even a dead letter can be written. The reaper tries again when the lease has expired.
                self._finish(pending, attempt, settled=False)

        await salvage(batch, write_some, refuse)

    async def _write_successes(self, db: Connection, pending: Pending, batch: Sequence[AttemptOutcome]) -> None:
        attempts = [(attempt.claim.job_id, attempt.claim.fence_token) for attempt, _ in batch]
        results = [
            (attempt.claim.fence_token, outcome.result)
            for attempt, outcome in batch
            if isinstance(outcome, Succeeded) and outcome.result is not None
        ]
        written = await queries.settle_succeeded(db, node=self._node, attempts=attempts, results=results)
        if len(written) == len(batch):
            settled = [attempt for attempt, _ in batch]
        else:
            settled_tokens = set(written)
            settled = [attempt for attempt, _ in batch if attempt.claim.fence_token in settled_tokens]
            await self._handle_unsettled(
                db, pending, [ended for ended in batch if ended[0].claim.fence_token not in settled_tokens]
            )
        self._finish_succeeded(pending, settled)

    async def _write_others(self, db: Connection, pending: Pending, batch: Sequence[AttemptOutcome]) -> None:
        terms = {
            found.fence_token: found
            for found in await queries.load_terms(
                db,
                node=self._node,
                attempts=[(attempt.claim.job_id, attempt.claim.fence_token) for attempt, _ in batch],
            )
        }
        decided: dict[FenceToken, tuple[Attempt, Outcome, Terms, Settlement]] = {}
        rows = []
        holds = []
        for attempt, outcome in batch:
            token = attempt.claim.fence_token
            if (found := terms.get(token)) is None:
                continue
            settlement = decide(found, outcome, self._random)
            if (row := settlement_row(found, outcome, settlement)) is not None:
                decided[token] = (attempt, outcome, found, settlement)
                rows.append(row)
                if isinstance(outcome, Held):
                    holds.append((outcome.key, outcome.after, outcome.at))
        if holds:  # before the jobs are released
            await queries.extend_holds(db, holds)
        written = await queries.settle_unfinished(db, rows, expired_only=False, alert=self._alert) if rows else {}
        for token, settlement_name in written.items():
            attempt, outcome, found, settlement = decided[token]
            report_settlement(
                self._telemetry,
                found,
                outcome,
                settlement,
                settlement_name,
                seconds=(attempt.ended_at or boottime()) - attempt.claim_sent_at,
            )
            if settlement_name in SUCCESS_BY_SETTLEMENT:
                self._report_end(attempt, succeeded=SUCCESS_BY_SETTLEMENT[settlement_name])
            self._finish(pending, attempt)
        if missing := [ended for ended in batch if ended[0].claim.fence_token not in written]:
            await self._handle_unsettled(db, pending, missing)

    async def _handle_unsettled(self, db: Connection, pending: Pending, missing: Sequence[AttemptOutcome]) -> None:
        """Find out why settlements changed no row, and settle, retry or give up each."""
        attempts = [(attempt.claim.job_id, attempt.claim.fence_token) for attempt, _ in missing]
        findings = await queries.examine_unsettled(db, node=self._node, attempts=attempts)
        for attempt, outcome in missing:
            claim = attempt.claim
            match findings.get(claim.fence_token):
                case "settled":
                    self._finish_succeeded(pending, [attempt])
                case "written":  # a retry or the like that was committed, but whose reply was lost
                    self._telemetry.settlement_confirmed(job_id=claim.job_id, handler=claim.handler)
                    self._report_end(attempt, succeeded=None)
                    self._finish(pending, attempt)
                case "free" | "held" as finding:  # nothing was written and the claim may still hold: try again
                    del pending[claim.fence_token]
                    pause = self._pause_after_unsettled(attempt, locked=finding == "held")
                    asyncio.get_running_loop().call_later(pause, self.add, attempt, outcome)
                case _:
                    self._telemetry.write_refused(job_id=claim.job_id, handler=claim.handler, what="settlement")
                    self._telemetry.lease_lost(job_id=claim.job_id, handler=claim.handler)
                    self._finish(pending, attempt)

    def _pause_after_unsettled(self, attempt: Attempt, *, locked: bool) -> float:
        """Return the seconds until the next try. Report a job whose settlements a trigger drops."""
        attempt.settlements_ignored = 0 if locked else attempt.settlements_ignored + 1
        if attempt.settlements_ignored < MAX_IGNORED:
            return LOCKED_RETRY_SECONDS
        self._telemetry.row_refused(
            "settlement",
            ChangeIgnored(),
            again_in=IGNORED_RETRY_SECONDS,
            job_id=attempt.claim.job_id,
            handler=attempt.claim.handler,
        )
        return IGNORED_RETRY_SECONDS

    def _finish_succeeded(self, pending: Pending, attempts: Sequence[Attempt]) -> None:
        self._telemetry.jobs_succeeded(
            (attempt.claim.queue, attempt.claim.handler, attempt.ended_at - attempt.claim_sent_at)
            for attempt in attempts
        )
        for attempt in attempts:
            self._telemetry.job_succeeded(attempt.claim.job_id, attempt=attempt.claim.attempt)
            self._report_end(attempt, succeeded=True)
            self._finish(pending, attempt)

    def _report_end(self, attempt: Attempt, *, succeeded: bool | None) -> None:
        """Call `on_end` if the job belongs to a schedule."""
        if attempt.claim.schedule_id is not None:
            self._on_end(attempt.claim.schedule_id, succeeded)

    def _finish(self, pending: Pending, attempt: Attempt, *, settled: bool = True) -> None:
        pending.pop(attempt.claim.fence_token, None)
        self._permits_free = self._permits_free or attempt.claim.is_limited
        if attempt.ended_at:  # a handler that is still running keeps its slot
            self._running.remove(attempt, settled=settled)

    async def _report_free_permits(self, db: Connection) -> None:
        if self._permits_free:
            self._permits_free = False
            if self._on_permits_free() and boottime() >= self._may_notify_at:
                self._may_notify_at = boottime() + NOTIFY_SECONDS
                await queries.wake_dispatchers(db)

    def _queue_again(self, ended: Iterable[AttemptOutcome]) -> None:
        self._queued[:0] = ended
        self._has_queued.set()


async def settle_same_outcome(
    db: Connection,
    found: Sequence[Terms],
    outcome: Outcome,
    telemetry: Telemetry,
    *,
    random: Callable[[], float],
    expired_only: bool,
    alert: str | None,
) -> list[tuple[Terms, str]]:
    """Settle attempts with the same outcome; return (terms, settlement) of each that was written.

    With `expired_only`, a job whose settlement the database refuses becomes a dead letter. Without this, the reaper would find
    it again and again.
    """

    async def write(some: Sequence[Terms]) -> list[tuple[Terms, str]]:
        terms = {each.fence_token: each for each in some}
        decided = {token: decide(each, outcome, random) for token, each in terms.items()}
        rows = [settlement_row(each, outcome, decided[token]) for token, each in terms.items()]
        writable = [row for row in rows if row is not None]
        if not writable:
            return []
        written = await queries.settle_unfinished(db, writable, expired_only=expired_only, alert=alert)
        for token, settlement in written.items():
            report_settlement(telemetry, terms[token], outcome, decided[token], settlement, seconds=None)
        return [(terms[token], settlement) for token, settlement in written.items()]

    async def refuse(terms: Terms, error: Exception) -> list[tuple[Terms, str]]:
        kind = type(error).__name__
        telemetry.settlement_rejected(job_id=terms.job_id, kind=kind)
        simpler = simpler_outcome(outcome, kind) if expired_only else None
        if simpler is None:
            return []
        return await settle_same_outcome(
            db, [terms], simpler, telemetry, random=random, expired_only=expired_only, alert=alert
        )

    return [each for settled in await salvage(found, write, refuse) for each in settled]
