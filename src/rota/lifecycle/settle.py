"""Step 6 of a job's life: outcomes -> fenced statements. Whatever gathers while one is in flight goes out with the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

import asyncpg

from rota.db import queries
from rota.db.pool import Connection, Pool, connection, cut
from rota.db.salvage import Fault, fault_of, salvage
from rota.domain.forecast import given_up
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
    HolderLost,
    Interrupted,
    LeaseLost,
    Outcome,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
)
from rota.domain.settlement import Abandon, Bury, Cancel, Release, Retry, Settlement, Succeed
from rota.lifecycle.retry_planner import BASE, CAP, decide
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from rota.db.queries import Verdict
    from rota.domain.job import FenceToken, NodeId, Terms
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.running import Running
    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

LARGEST = 1000
"""Most settlements in one statement: enough to spend little on each, few enough to hold no lock for long."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

LOCKED_PAUSE = 0.1
"""Seconds until a job whose row somebody holds locked is tried again."""

MAX_SETTLE_CRASHES = 3
"""How often writing one outcome may crash until its attempt is left to its lease."""

Ended = tuple["Attempt", Outcome]

Write = Callable[[Connection, "dict[FenceToken, Ended]", "Sequence[Ended]"], "Awaitable[None]"]

SAID = {"retry": "retried", "release": "released", "bury": "dead", "cancel": "cancelled"}
"""What the statement calls a settlement -> what logs and metrics call it."""

UNSTORABLE = "SettlementRejected"
"""The error kind of an attempt whose outcome the database refused to store."""

ENDS = {"bury": False, "cancel": None}
"""Which of these end a job, and whether that is a success: to be cancelled is neither success nor failure."""


class Settler:
    """Service: one statement carries every success that gathered during the last one, another one all the rest."""

    name = "settle"
    interval: timedelta | None = None
    max_backoff_seconds = 1.0
    """Seconds: what is done must be written before its lease ends."""

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
    ) -> None:
        self._monitor = monitor
        self._pool = pool
        self._on_end = on_end
        self._running = running
        self._telemetry = telemetry
        self._node = node
        self._random = random
        self._alert = alert
        self._gathered: list[Ended] = []
        self._some = asyncio.Event()
        self._crash: Exception | None = None
        """A bug met in writing one outcome, which must not keep the others of its batch from being written."""

    def add(self, attempt: Attempt, outcome: Outcome) -> None:
        """Take an outcome; its slot is freed once it stands in the database, or is known to be somebody else's."""
        self._gathered.append((attempt, outcome))
        self._some.set()

    def abandon(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that is not to be settled."""
        self._running.remove(attempt, settled=False)

    async def run_once(self) -> None:
        """Wait for outcomes, and write what has gathered."""
        await self._some.wait()
        self._some.clear()
        batch, self._gathered = self._gathered[:LARGEST], self._gathered[LARGEST:]
        if self._gathered:
            self._some.set()
        left = {attempt.claim.fence_token: (attempt, outcome) for attempt, outcome in batch}
        try:
            with self._monitor.waiting_for_database(self.name):
                await self._write(left)
        except BaseException:
            # After a crash or a lost reply, too: an outcome that was written is found to be settled by this very token.
            self._come_again(left.values())
            raise

    async def _write(self, left: dict[FenceToken, Ended]) -> None:
        """Write all of `left`, taking out of it what is done."""
        successes, others = [], []
        for token, (attempt, outcome) in list(left.items()):
            match outcome:
                case Succeeded():
                    successes.append((attempt, outcome))
                case Committed():
                    self._succeeded(left, [attempt])
                case LeaseLost():
                    self._telemetry.lease_lost(job_id=attempt.claim.job_id, handler=attempt.claim.handler)
                    self._done(left, attempt, settled=False)
                case _:
                    others.append(left[token])
        if not left:
            return
        async with connection(self._pool) as db:
            if successes:
                await self._salvage(db, left, successes, self._write_successes)
            if others:
                await self._salvage(db, left, others, self._write_others)
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    async def _salvage(
        self, db: Connection, left: dict[FenceToken, Ended], batch: Sequence[Ended], write: Write
    ) -> None:
        """Write the batch. A job that can't be settled as asked is settled with less, in the end as a dead letter."""

        async def write_some(some: Sequence[Ended]) -> None:
            try:
                await write(db, left, some)
            except Exception as error:
                if isinstance(error, asyncpg.PostgresError) or fault_of(error) is not Fault.FATAL or cut(db):
                    raise
                # A bug. It may be about one outcome, which must not keep the others from being written.
                if len(some) > 1:
                    for ended in some:
                        await write_some([ended])
                    return
                attempt = some[0][0]
                attempt.settle_crashes += 1
                if attempt.settle_crashes < MAX_SETTLE_CRASHES:
                    self._crash = error  # raised once the others are written; this one stays in `left`
                else:
                    await refuse(some[0], error)

        async def refuse(ended: Ended, error: Exception) -> None:
            attempt, outcome = ended
            kind = type(error).__name__
            self._telemetry.settlement_rejected(job_id=attempt.claim.job_id, kind=kind)
            if (simpler := _simpler_outcome(outcome, kind)) is not None:
                del left[attempt.claim.fence_token]
                self._come_again([(attempt, simpler)])
            else:
                # Not even a dead letter can be written: the lease ends, and the reaper tries again.
                self._done(left, attempt, settled=False)

        await salvage(batch, write_some, refuse)

    async def _write_successes(self, db: Connection, left: dict[FenceToken, Ended], batch: Sequence[Ended]) -> None:
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
            stand = set(written)
            settled = [attempt for attempt, _ in batch if attempt.claim.fence_token in stand]
            await self._examine(db, left, [ended for ended in batch if ended[0].claim.fence_token not in stand])
        self._succeeded(left, settled)

    async def _write_others(self, db: Connection, left: dict[FenceToken, Ended], batch: Sequence[Ended]) -> None:
        terms = {
            found.fence_token: found
            for found in await queries.load_terms(
                db,
                node=self._node,
                attempts=[(attempt.claim.job_id, attempt.claim.fence_token) for attempt, _ in batch],
            )
        }
        decided: dict[FenceToken, tuple[Attempt, Outcome, Terms, Settlement]] = {}
        verdicts = []
        for attempt, outcome in batch:
            token = attempt.claim.fence_token
            if (found := terms.get(token)) is None:
                continue
            settlement = decide(found, outcome, self._random)
            if (verdict := as_verdict(found, outcome, settlement)) is not None:
                decided[token] = (attempt, outcome, found, settlement)
                verdicts.append(verdict)
        written = (
            await queries.settle_unfinished(db, verdicts, expired_only=False, alert=self._alert) if verdicts else {}
        )
        for token, settlement_name in written.items():
            attempt, outcome, found, settlement = decided[token]
            report(
                self._telemetry,
                found,
                outcome,
                settlement,
                settlement_name,
                seconds=(attempt.ended_at or boottime()) - attempt.started,
            )
            if settlement_name in ENDS:
                self._ended(attempt, succeeded=ENDS[settlement_name])
            self._done(left, attempt)
        if missing := [ended for ended in batch if ended[0].claim.fence_token not in written]:
            await self._examine(db, left, missing)

    async def _examine(self, db: Connection, left: dict[FenceToken, Ended], missing: Sequence[Ended]) -> None:
        """Find out why settlements touched no row."""
        attempts = [(attempt.claim.job_id, attempt.claim.fence_token) for attempt, _ in missing]
        findings = await queries.examine_unsettled(db, node=self._node, attempts=attempts)
        for attempt, outcome in missing:
            claim = attempt.claim
            match findings.get(claim.fence_token):
                case "settled":
                    self._succeeded(left, [attempt])
                case "written":
                    self._telemetry.settlement_confirmed(job_id=claim.job_id, handler=claim.handler)
                    self._ended(attempt, succeeded=None)
                    self._done(left, attempt)
                case "free" | "held":
                    del left[claim.fence_token]
                    asyncio.get_running_loop().call_later(LOCKED_PAUSE, self.add, attempt, outcome)
                case _:
                    self._telemetry.write_refused(job_id=claim.job_id, handler=claim.handler, what="settlement")
                    self._telemetry.lease_lost(job_id=claim.job_id, handler=claim.handler)
                    self._done(left, attempt)

    def _succeeded(self, left: dict[FenceToken, Ended], attempts: Sequence[Attempt]) -> None:
        self._telemetry.jobs_succeeded(_told(attempt) for attempt in attempts)
        for attempt in attempts:
            self._telemetry.job_succeeded(attempt.claim.job_id, attempt=attempt.claim.attempt)
            self._ended(attempt, succeeded=True)
            self._done(left, attempt)

    def _ended(self, attempt: Attempt, *, succeeded: bool | None) -> None:
        """Tell the schedule's side that one of its jobs has left the live ones."""
        if attempt.claim.schedule_id is not None:
            self._on_end(attempt.claim.schedule_id, succeeded)

    def _done(self, left: dict[FenceToken, Ended], attempt: Attempt, *, settled: bool = True) -> None:
        left.pop(attempt.claim.fence_token, None)
        if attempt.ended_at:  # an abandoned handler keeps its slot
            self._running.remove(attempt, settled=settled)

    def _come_again(self, ended: Iterable[Ended]) -> None:
        self._gathered[:0] = ended
        self._some.set()


def _told(attempt: Attempt) -> tuple[str, str, float]:
    return attempt.claim.queue, attempt.claim.handler, attempt.ended_at - attempt.started


def _simpler_outcome(outcome: Outcome, kind: str) -> Outcome | None:
    """Return an outcome that is easier to store than the refused one, or None after the last: a dead letter without a text."""
    match outcome:
        case Succeeded(result) if result is not None:
            return Succeeded(None)
        case Succeeded():
            return Failed(
                kind=UNSTORABLE, text=f"the attempt succeeded, which could not be stored: {kind}", permanent=True
            )
        case Failed(kind=was, permanent=permanent) if was != UNSTORABLE:
            return Failed(kind=UNSTORABLE, text=f"the handler's error could not be stored: {kind}", permanent=permanent)
        case Failed(permanent=True):
            return None
        case _:
            return Failed(kind=UNSTORABLE, text=f"the job could not be settled as asked: {kind}", permanent=True)


def as_verdict(terms: Terms, outcome: Outcome, settlement: Settlement) -> Verdict | None:
    """Return the row of `settle_unfinished` that writes this settlement, or None where there is nothing to write."""
    what, kind, text = say(outcome)
    who = (terms.job_id, terms.fence_token, terms.leased_by)
    match settlement:
        case Retry(delay, at):
            return (*who, "retry", delay, at, what, None, kind, text)
        case Release(delay, at):
            return (*who, "release", delay, at, what, None, kind, text)
        case Bury(reason):
            return (*who, "bury", None, None, what, reason, kind, text)
        case Cancel(reason):
            return (*who, "cancel", None, None, what, reason, kind, text)
        case Succeed() | Abandon():
            return None
        case _:
            assert_never(settlement)


def say(outcome: Outcome) -> tuple[str, str | None, str | None]:
    """Return what stands in `rota.attempts`: outcome, error kind, error."""
    match outcome:
        case Failed(kind=kind, text=text):
            return "failed", kind, text
        case Undecodable(kind, text):
            return "undecodable", kind, text
        case TimedOut(timeout, abandoned=where):
            left = (
                f"; the handler did not stop: its {where} was abandoned, and keeps its slot until it ends"
                if where
                else ""
            )
            return "timed_out", "Timeout", f"ran longer than its timeout of {timeout}{left}"
        case Snoozed():
            return "snoozed", None, None
        case Cancelled(reason):
            return "cancelled", None, reason
        case Interrupted():
            return "interrupted", None, "the daemon was stopped"
        case HolderLost():
            return "lost", "LeaseExpired", "its lease expired: the daemon that ran it died, hung, or was cut off"
        case LeaseLost():
            return "lost", None, None
        case Succeeded() | Committed():
            return "succeeded", None, None
        case _:
            assert_never(outcome)


async def settle_alike(
    db: Connection,
    found: Sequence[Terms],
    outcome: Outcome,
    telemetry: Telemetry,
    *,
    random: Callable[[], float],
    expired_only: bool,
    alert: str | None,
) -> list[tuple[Terms, str]]:
    """Settle attempts that ended in the same way; return (terms, settlement) of each that was written.

    With `expired_only`, a job that can't be settled as decided becomes a dead letter: the reaper must not meet it for ever.
    """

    async def write(some: Sequence[Terms]) -> list[tuple[Terms, str]]:
        terms = {each.fence_token: each for each in some}
        decided = {token: decide(each, outcome, random) for token, each in terms.items()}
        verdicts = [as_verdict(each, outcome, decided[token]) for token, each in terms.items()]
        writable = [verdict for verdict in verdicts if verdict is not None]
        if not writable:
            return []
        written = await queries.settle_unfinished(db, writable, expired_only=expired_only, alert=alert)
        for token, settlement in written.items():
            report(telemetry, terms[token], outcome, decided[token], settlement, seconds=None)
        return [(terms[token], settlement) for token, settlement in written.items()]

    async def refuse(terms: Terms, error: Exception) -> list[tuple[Terms, str]]:
        kind = type(error).__name__
        telemetry.settlement_rejected(job_id=terms.job_id, kind=kind)
        simpler = _simpler_outcome(outcome, kind) if expired_only else None
        if simpler is None:
            return []
        return await settle_alike(
            db, [terms], simpler, telemetry, random=random, expired_only=expired_only, alert=alert
        )

    return [each for settled in await salvage(found, write, refuse) for each in settled]


def report(
    telemetry: Telemetry, terms: Terms, outcome: Outcome, settlement: Settlement, written: str, *, seconds: float | None
) -> None:
    """Report the settlement of an attempt that did not succeed."""
    what, kind, error = say(outcome)
    due = left = None
    if written != "cancel" and isinstance(settlement, Retry | Release):
        due = _due_in(settlement)
        if due is not None and isinstance(settlement, Retry):
            left = gives_up_in(terms, due)
    telemetry.job_settled(
        job_id=terms.job_id,
        handler=terms.handler,
        queue=terms.queue,
        settlement=SAID[written],
        outcome=what,
        attempt=terms.attempt,
        seconds=seconds,
        error=error,
        max_attempts=terms.max_attempts,
        releases=terms.releases or None,
        kind=kind,
        reason=settlement.reason if isinstance(settlement, Bury) and written == "bury" else None,
        due_in_s=None if due is None else round(due.total_seconds(), 3),
        gives_up_in_s=None if left is None else round(left.total_seconds()),
        do=f"rota dead show {terms.job_id}, and redrive or discard it" if written == "bury" else None,
    )


def gives_up_in(terms: Terms, due: timedelta) -> timedelta:
    """Say how long from now it takes at most, besides what attempts take, until a job that goes on failing is given up.

    `due`: until its next attempt.
    """
    waits = _later_waits(
        terms.attempt + 1, terms.max_attempts or 1, terms.backoff_base or BASE, terms.backoff_cap or CAP
    )
    return due + waits if terms.retry_left is None else max(due, min(due + waits, terms.retry_left))


@lru_cache(1024)
def _later_waits(attempt: int, max_attempts: int, base: timedelta, cap: timedelta) -> timedelta:
    # Kept, because there may be a thousand of them, for each of a thousand jobs that fail together.
    return given_up(attempt=attempt, at=EPOCH, max_attempts=max_attempts, base=base, cap=cap).latest - EPOCH


def _due_in(settlement: Retry | Release) -> timedelta | None:
    """Say when the next attempt is due, for a reader: where an instant was asked for, by this machine's clock."""
    if settlement.at is not None:
        return max(timedelta(0), settlement.at - datetime.now(UTC))
    return settlement.delay
