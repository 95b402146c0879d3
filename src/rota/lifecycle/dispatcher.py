"""Claim due jobs, never more than the free slots, and start them.

`lanes` decides which lanes a look searches, `turns` when limited jobs are claimed and whose turn it is, `suspects` how many jobs
that lost their worker twice may run at once, `slots` how many jobs are claimed ahead, and `refused_jobs` when a job is tried again
whose row can't be claimed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import asyncpg

from rota.db import queries
from rota.db.pool import Pool, connection
from rota.db.queries import Claimed, LimitedClaims, LimitedSearch
from rota.db.salvage import ROW_CLIENT_ERRORS, TRANSIENT, Fault, fault_of, salvage
from rota.domain.job import Suspects
from rota.handlers.attempt import Attempt
from rota.lifecycle.lanes import BUSY_CLAIM_SIZE, MAX_LISTED_QUEUES, SHARED_GROUP, Lanes
from rota.lifecycle.refused_jobs import RefusedJobs
from rota.lifecycle.turns import Turns
from rota.runtime.clock import boottime
from rota.supervision.loop import backoff_pause, is_cancel_pending

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from datetime import timedelta

    from rota.db.pool import Connection
    from rota.db.queries import DueJob, Lane
    from rota.domain.job import NodeId
    from rota.lifecycle.running import Running
    from rota.lifecycle.wake import Wake
    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

MAX_CLAIM_SIZE = 500
"""Most jobs of one slot group in one claim. More are claimed while these run."""

MAX_STREAK = 20
"""Most further claims on one connection before it is returned to the pool. Each is sent before the jobs of the last one run."""

BUSY_SECONDS = 0.02
"""How long a node stays busy after a large claim. Notifications are off meanwhile: turning them on and off costs two statements."""

NO_LIMITED_CLAIMS = LimitedClaims(Claimed([]), weights=[], contended=False, complete={}, stopped={})

Found = TypeVar("Found")

SUSPECT_CHECK_SECONDS = 10.0
"""Seconds between two searches for suspects while there are none."""


@dataclass(slots=True)
class Look:
    """The result of one look."""

    claimed: int = 0
    next_in: timedelta | None = None
    """Time until the earliest future job of the searched lanes."""
    no_suspects: bool = False
    """Whether this look searched for suspects and found none."""

    def add(self, found: Claimed) -> None:
        """Add the result of one claim."""
        self.claimed += len(found.claims)
        self.next_in = min((each for each in (self.next_in, found.next_in) if each is not None), default=None)


class Listener(Protocol):
    """The part of the listening connection that the dispatcher uses."""

    @property
    def armed(self) -> bool:
        """Whether every insert that commits from now on wakes this node."""
        ...

    def want(self, armed: bool, /) -> None:
        """Turn notifications of inserts on, or off while the dispatcher looks again anyway."""
        ...


class Dispatcher:
    """Claims due jobs and starts them."""

    name = "dispatcher"

    def __init__(
        self,
        pool: Pool,
        running: Running,
        wake: Wake,
        listener: Listener,
        telemetry: Telemetry,
        *,
        monitor: ServiceMonitor,
        node: NodeId,
        handlers: Collection[str],
        queues: Mapping[str, int],
        lease: timedelta,
        poll_interval: timedelta,
        start: Callable[[Attempt], None],
        on_idle: Callable[[], None] | None = None,
        alert: str | None = None,
        restarted: bool = False,
        job_ended: Callable[[int, bool | None], None] | None = None,
    ) -> None:
        self._pool = pool
        self._running = running
        self._wake = wake
        self._listener = listener
        self._telemetry = telemetry
        self._monitor = monitor
        self._node = node
        self._lease = lease
        self._poll = poll_interval.total_seconds()
        self._start = start
        self._on_idle = on_idle
        self._refused = RefusedJobs(telemetry, alert=alert, job_ended=job_ended)
        self._has_handlers = bool(handlers)
        self._handlers = sorted(handlers)
        self._groups_served = [group for group, size in queues.items() if size > 0]
        self._own_queues = [queue for queue in queues if queue != SHARED_GROUP]
        self._lanes = Lanes(handlers, queues, poll=self._poll)
        self._turns = Turns(poll=self._poll)
        self._stopping = asyncio.Event()
        self._suspects_at = 0.0
        """When to search for suspects again."""
        self._suspects_first = False
        """Whether the last look left no slot for a suspect, so the next look claims suspects first."""
        self._busy_until = 0.0
        """Until then, this node looks again by itself instead of waiting for notifications."""
        self._may_have_orphans = restarted  # a crash may have come between a claim's answer and the start of its jobs
        self.reached = 0.0
        """When the database last answered, on this node's clock."""

    def look_at_limits(self) -> None:
        """Claim limited jobs at the next look: a permit may be free, or a limit may have changed."""
        self._turns.wake()

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim and start jobs until `stopping` is set. Calls `on_idle` when nothing is due and nothing runs."""
        if not self._has_handlers:
            if self._on_idle is not None:
                self._on_idle()
            await stopping.wait()
            return
        self._stopping = stopping
        self._monitor.record_start(self.name)
        while not stopping.is_set():
            self._wake.clear()  # before looking, never after
            pause = await self._look()
            if is_cancel_pending():
                raise asyncio.CancelledError
            if not stopping.is_set():
                await self._wake.wait(pause)
        self._monitor.record_stop(self.name)  # a long drain does not count as a stall

    async def _look(self) -> float:
        """Claim due jobs. Return the seconds until the next look, unless a notification comes earlier."""
        self._running.begin_look()
        if not self._running.claimable():
            self._running.end_look(limited=True)
            self._listener.want(False)
            self._monitor.record_success(self.name)
            return self._poll
        try:
            with self._monitor.waiting_for_database(self.name):
                async with connection(self._pool) as db:
                    if self._may_have_orphans:
                        await self._return_orphans(db)
                    look = await self._claim(db)
                    for _ in range(MAX_STREAK):
                        if look.claimed < BUSY_CLAIM_SIZE or not self._running.claimable() or self._stopping.is_set():
                            break
                        look = await self._claim(db)
        except TRANSIENT as error:
            failures = self._monitor.record_failure(self.name, error)
            self._may_have_orphans = True
            pause = backoff_pause(failures)
            self._telemetry.service_failed(self.name, error, failures=failures, again_in=pause)
            self._running.end_look(limited=True)
            return pause
        self._monitor.record_success(self.name)
        self._monitor.record_obstacle(self.name, self._refused.obstacle)
        self._telemetry.service_ran(self.name)
        self._running.end_look(limited=self._on_idle is not None or not self._running.has_free_slots_everywhere())
        if (
            self._on_idle is not None
            and look.no_suspects
            and not self._refused
            and self._lanes.is_idle()
            and not self._turns.is_due(self._running.groups(), boottime(), notified=True)
        ):
            self._on_idle()
        return self._pause_after(look)

    def _pause_after(self, look: Look) -> float:
        now = boottime()
        if look.claimed >= BUSY_CLAIM_SIZE:
            self._listener.want(False)
            self._busy_until = now + BUSY_SECONDS
            return 0.0
        pauses = [
            self._lanes.pause(self._running.claimable(), now),
            self._turns.pause(self._running.groups(), now),
        ]
        if now < self._busy_until:
            pauses.append(self._busy_until - now)
        elif not self._listener.armed:
            self._listener.want(True)
            if look.claimed:
                return 0.0
        if look.next_in is not None:
            pauses.append(look.next_in.total_seconds())
        if self._running.probation.requests(now):
            pauses.append(self._suspects_at - now)
        return max(0.0, min(pauses))

    async def _claim(self, db: Connection) -> Look:
        look, lanes, now = Look(), self._lanes, boottime()
        self._refused.drop_expired(now)
        lanes.begin_look(now, active=len(self._running) > 0)
        suspects_first = self._suspects_first
        if suspects_first:
            # Without this, a suspect would wait for as long as other work fills every slot.
            self._suspects_first = False
            await self._claim_suspects(db, look)
        free = self._running.groups()
        if free and self._turns.is_due(free, boottime(), notified=self._listener.armed):
            await self._claim_in_turns(db, look)
        groups = self._groups()
        sweeping = lanes.groups_to_sweep_first({**groups, **free}, boottime())
        # Without slots, a sweep only finds the lanes that have to take turns with the limited jobs.
        if groups := dict.fromkeys(self._turns.open_groups & free.keys() & sweeping, 0) | groups:
            await self._search(db, groups, sweeping & groups.keys(), look)
        free = self._groups()
        unswept = lanes.groups_to_sweep_then(free, boottime())
        if groups := {group: slots for group, slots in free.items() if group in unswept}:
            await self._search(db, groups, set(groups), look)
        if not suspects_first and (self._on_idle is not None or boottime() >= self._suspects_at):
            self._suspects_first = not self._running.has_free_slots_everywhere()
            if not self._suspects_first:
                await self._claim_suspects(db, look)
        lanes.end_look(look.claimed)
        return look

    async def _search(self, db: Connection, groups: dict[str, int], sweeping: set[str], look: Look) -> None:
        """Claim from the busy lanes of these groups, and from all lanes of the groups in `sweeping`."""
        lanes, began = self._lanes, boottime()
        after = lanes.foreign.after
        claimed: Counter[str] = Counter()
        try:
            if lanes.must_list_queues(sweeping, began):
                await self._list_foreign_queues(db)
            known = lanes.known_queues() if SHARED_GROUP in sweeping else None
            found = await self._claim_lanes(db, groups, lanes.lanes(groups, sweeping), known=known)
            for queue, count in Counter(claim.queue for claim in found.claims).items():
                claimed[lanes.group(queue)] += count
            look.add(found)
            if found.others:
                await self._list_foreign_queues(db)
                left = {SHARED_GROUP: groups[SHARED_GROUP] - claimed[SHARED_GROUP]}
                if left[SHARED_GROUP] > 0:
                    found = await self._claim_lanes(db, left, lanes.all_lanes({SHARED_GROUP}))
                    claimed[SHARED_GROUP] += len(found.claims)
                    look.add(found)
        except TRANSIENT:
            lanes.foreign.rewind(after)  # this page has not been searched
            raise
        lanes.searched(groups, claimed, sweeping, began=began, ended=boottime())

    async def _list_foreign_queues(self, db: Connection) -> None:
        lanes = self._lanes
        found = await queries.list_queues(
            db, after=lanes.foreign.after, limit=MAX_LISTED_QUEUES, handlers=lanes.handlers
        )
        lanes.queues_listed(found, boottime())

    async def _claim_suspects(self, db: Connection, look: Look) -> None:
        """Claim as many suspects as probation allows now."""
        now, next_in = boottime(), SUSPECT_CHECK_SECONDS
        everywhere = self._running.has_free_slots_everywhere()
        requests = self._running.probation.requests(now)
        if not requests:
            return
        for kind, most in requests:
            groups = {group: min(free, most) for group, free in self._running.groups().items()}
            lanes = self._lanes.all_lanes(groups)
            found = await self._claim_lanes(db, groups, lanes, suspects=kind, at_most=most)
            if found.limited and not found.claims:
                found = (await self._claim_limited(db, groups, lanes, suspects=kind, total=most)).claimed
            look.add(found)
            if found.next_in is not None:
                next_in = min(next_in, found.next_in.total_seconds())
            if found.claims:
                full = len(found.claims) == most
                self._suspects_at = now if full else now + min(next_in, self._poll)
                return
        look.no_suspects = True
        self._suspects_at = now + (next_in if everywhere else min(next_in, self._poll))

    async def _claim_lanes(
        self,
        db: Connection,
        groups: dict[str, int],
        lanes: list[Lane],
        *,
        suspects: Suspects = Suspects.NONE,
        at_most: int | None = None,
        known: list[str] | None = None,
    ) -> Claimed:
        """Claim from these lanes and start the jobs. Set aside a job whose row makes the claim fail, and claim the others."""
        if not lanes or not groups or self._stopping.is_set():
            return Claimed([])
        total = sum(groups.values()) if at_most is None else at_most

        async def claim(only: Sequence[int] | None) -> Claimed:
            # Before the claim is sent, so that for this node the lease ends before it ends for the database.
            sent_at = boottime()
            free = self._running.groups() if suspects else self._running.claimable()
            found = await queries.claim_due_jobs(
                db,
                node=self._node,
                groups={group: min(slots, free.get(group, 0)) for group, slots in groups.items()},
                lanes=lanes,
                suspects=suspects,
                total=total,
                lease=self._lease,
                known=known,
                only=only,
                skipped=self._refused.job_ids,
            )
            self.reached = boottime()
            self._start_claimed(found, sent_at=sent_at, suspects=suspects)
            self._refused.add_ignored(found)
            if not suspects:
                self._turns.seen(self.reached, limited=found.limited)
            return found

        async def find() -> list[DueJob]:
            return await queries.find_due_jobs(
                db, lanes=lanes, suspects=suspects, skipped=self._refused.job_ids, limit=total
            )

        found = await self._salvaged(db, claim, find)
        if isinstance(found, Claimed):
            return found
        merged = Look()
        for each in found:
            merged.add(each)
        return Claimed([claim for each in found for claim in each.claims], next_in=merged.next_in)

    async def _claim_in_turns(self, db: Connection, look: Look) -> None:
        """Claim limited jobs for the free slots, never ahead of them, and in turn with them jobs of the busy lanes."""
        free = self._running.groups()
        groups = {group: min(free.get(group, 0), MAX_CLAIM_SIZE) for group in self._groups_served}
        began = boottime()
        found = await self._claim_limited(db, groups, self._lanes.busy_lanes(free), total=sum(groups.values()))
        self._turns.claimed(found, groups, self._lanes.group, began=began, ended=boottime())
        look.add(found.claimed)

    async def _claim_limited(
        self,
        db: Connection,
        groups: dict[str, int],
        lanes: list[Lane],
        *,
        total: int,
        suspects: Suspects = Suspects.NONE,
    ) -> LimitedClaims:
        """Claim limited jobs and start them. Set aside a job whose row makes the claim fail, and claim the others."""
        search = LimitedSearch(
            node=self._node,
            groups=groups,
            own_queues=self._own_queues,
            handlers=self._handlers,
            lanes=lanes,
            cursors=self._turns.cursors,
            positions=self._turns.positions,
            suspects=int(suspects),
            total=total,
            lease=self._lease,
        )

        async def claim(only: Sequence[int] | None) -> LimitedClaims:
            sent_at = boottime()
            found = await queries.claim_limited_jobs(db, search, only=only, skipped=self._refused.job_ids)
            self.reached = boottime()
            self._start_claimed(found.claimed, sent_at=sent_at, suspects=suspects)
            self._refused.add_ignored(found.claimed)
            return found

        async def find() -> list[DueJob]:
            return await queries.find_limited_jobs(db, search, skipped=self._refused.job_ids)

        found = await self._salvaged(db, claim, find)
        if isinstance(found, LimitedClaims):
            return found
        # A row was refused: walk the keys again.
        return NO_LIMITED_CLAIMS._replace(complete=dict.fromkeys(groups, False))

    async def _salvaged(
        self,
        db: Connection,
        claim: Callable[[Sequence[int] | None], Awaitable[Found]],
        find: Callable[[], Awaitable[list[DueJob]]],
    ) -> Found | list[Found]:
        """Return what `claim` found. If a row makes it fail, claim what `find` returns in parts, and set the bad jobs aside."""
        try:
            return await claim(None)
        except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
            if fault_of(error) is not Fault.ROW:
                raise
            await self._after_refused_claim(db, error)

        async def claim_some(jobs: Sequence[DueJob]) -> Found | None:
            try:
                return await claim([job.job_id for job in jobs])
            except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
                if fault_of(error) is Fault.ROW:
                    await self._after_refused_claim(db, error)
                raise

        async def refuse(job: DueJob, error: Exception) -> Found | None:
            await self._refused.add(db, job, error)
            return None

        await claim([])  # raises if the database refuses the statement itself, for any row
        return [found for found in await salvage(await find(), claim_some, refuse) if found is not None]

    def _start_claimed(self, found: Claimed, *, sent_at: float, suspects: Suspects) -> None:
        lease = self._lease.total_seconds()
        attempts = [
            Attempt(
                claim,
                lease=lease if claim.lease is None else claim.lease.total_seconds(),
                claim_sent_at=sent_at,
                suspect=suspects,
            )
            for claim in found.claims
        ]
        self._running.add(attempts, self._start)
        if not suspects:
            self._lanes.found_due(found.due_lanes, sent_at)
        if found.claims:
            # Jobs with a key are not in the lanes, so their run_at must not become a floor there.
            self._lanes.claimed(
                [] if suspects else [claim for claim in found.claims if claim.limit_key is None], sent_at
            )
            self._telemetry.jobs_claimed(found.claims)

    async def _after_refused_claim(self, db: Connection, error: Exception) -> None:
        if isinstance(error, ROW_CLIENT_ERRORS):
            # The driver could not read the answer, so the claim has committed: give the jobs back.
            await self._return_orphans(db)

    def _groups(self) -> dict[str, int]:
        """Return the free slots to fill in one claim.

        The group with the most free slots gets up to MAX_CLAIM_SIZE. The other groups get an equal share of MAX_CLAIM_SIZE each.
        """
        # Where limited jobs may be started, no others are claimed ahead of the slots: they would get more than their turns.
        free = self._running.groups()
        groups = {
            group: free.get(group, 0) if group in self._turns.open_groups else count
            for group, count in self._running.claimable().items()
        }
        groups = {group: count for group, count in groups.items() if count > 0}
        if not groups:
            return {}
        largest = max(groups, key=lambda group: groups[group])
        share = max(1, MAX_CLAIM_SIZE // len(groups))
        return {group: min(free, MAX_CLAIM_SIZE if group == largest else share) for group, free in groups.items()}

    async def _return_orphans(self, db: Connection) -> None:
        """Release claims whose reply was lost. Without this, their jobs would wait until the leases expire."""
        known = [attempt.claim.fence_token for attempt in self._running.attempts]
        found = await queries.find_orphaned_claims(db, node=self._node, known=known)
        # An attempt that ran here but was not settled is not an orphan: its job runs again when the lease ends.
        self._running.unsettled &= {token for _, token in found}
        orphans = [(job_id, token) for job_id, token in found if token not in self._running.unsettled]
        if orphans:
            await queries.release_claims(db, node=self._node, claims=orphans)
            self._telemetry.orphans_released(len(orphans))
        self._may_have_orphans = False
