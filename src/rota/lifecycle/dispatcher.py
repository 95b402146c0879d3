"""Step 2 of a job's life: due rows -> claims, never more than the free slots.

The lanes (queue, handler, priority) are looked at in two ways. Claims with a *floor* look only at lanes that had work lately,
and only from the run_at claimed last; they cost the same however many dead rows lie before it. *Sweeps* look at all lanes and
all rows, and find what the floors hide: late commits, back-dated rows, new lanes. A sweep follows whenever a claim comes back
short, but takes no more than a tenth of the time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

import asyncpg

from rota.attempt import Attempt
from rota.clock import boottime
from rota.db import queries
from rota.db.pool import TRANSIENT, Pool, about_a_row, connection
from rota.db.queries import Claimed
from rota.loop import DUTY, backoff_pause, cancelling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rota.db.pool import Connection
    from rota.db.queries import Lane
    from rota.domain.job import Claim, NodeId
    from rota.lifecycle.running import Running
    from rota.lifecycle.wake import Wake
    from rota.loop import Pulse
    from rota.telemetry import Telemetry

ANY_TIME = datetime(1970, 1, 1, tzinfo=UTC)

PRIORITIES = range(10)

STREAM = 8
"""Claims at once from which on jobs come faster than notifications are worth sending."""

LARGEST = 500
"""Most jobs in one claim: with more slots than that, one batch starts while the next is claimed."""

QUIET = 60.0
"""Seconds after which a lane without work is no longer looked at but by sweeps."""

SUSPECTS = 10.0
"""Seconds between two looks for jobs that were lost twice in a row."""

LISTED = 20.0
"""Seconds after which the queues that share the slots of `*` are listed anew, though there seem to be no others."""

MOST_QUEUES = 200
"""Most queues that share the slots of `*` in one sweep; where there are more, they take turns."""

REFUSED = 10.0
"""Seconds for which a lane is left alone in which the database refuses the claim of a row."""

MOST_REFUSED = 100
"""Most lanes left alone at a time: where there are more, it is no matter of rows."""


@dataclass(slots=True)
class Look:
    """What one look found."""

    claimed: int = 0
    next_in: timedelta | None = None
    """How long until the earliest future job of the lanes looked at."""
    swept: bool = False
    """Whether all lanes have been looked at, by this look and those before it."""
    nothing: bool = False
    """Whether there was nothing to claim in any of them, and nothing ran meanwhile that might have inserted something."""
    suspects: bool = False
    """Whether suspects were looked for, too."""


class Listener(Protocol):
    """What the dispatcher asks of the listening connection."""

    @property
    def armed(self) -> bool:
        """True while every insert that commits from now on wakes us."""
        ...

    def want(self, armed: bool, /) -> None:
        """Have inserts notify, or spare them that while we look again anyway."""
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
        pulse: Pulse,
        node: NodeId,
        handlers: Collection[str],
        queues: Mapping[str, int],
        lease: timedelta,
        poll_interval: timedelta,
        start: Callable[[Attempt], None],
        on_idle: Callable[[], None] | None = None,
        restarted: bool = False,
    ) -> None:
        self._pool = pool
        self._running = running
        self._wake = wake
        self._listener = listener
        self._telemetry = telemetry
        self._pulse = pulse
        self._node = node
        self._handlers = sorted(handlers)
        self._own_queues = [queue for queue in queues if queue != "*"]
        self._shares = "*" in queues
        self._other_queues: list[str] = []
        self._last_queue = ""
        self._list_at = 0.0
        """From when on the queues that share `*` are listed anew; 0: at each sweep."""
        self._under_way = 0
        """Attempts that ran or were claimed since the look at all lanes began, which may take several turns."""
        self._lease = lease
        self._poll = poll_interval.total_seconds()
        self._start = start
        self._on_idle = on_idle
        self._floors: dict[tuple[str, str, int], datetime] = {}
        self._used: dict[tuple[str, str, int], float] = {}
        self._refused: dict[tuple[str, str, int], float] = {}
        """Lane -> until when it is left alone."""
        self._swept = 0.0
        self._sweep_at = 0.0
        self._stopping = asyncio.Event()
        self._suspects_at = 0.0
        self._crowded_out = False
        """Whether the last sweep left no slot for a suspect."""
        self._unsure = restarted  # a crash may have come between a claim's answer and the start of its jobs
        self.reached = 0.0
        """When the database last answered, on this node's clock."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Claim and start jobs until told to stop. `on_idle` is called when a look at all lanes finds nothing to do."""
        if not self._handlers:
            if self._on_idle is not None:
                self._on_idle()
            await stopping.wait()
            return
        self._stopping = stopping
        self._pulse.began(self.name)
        while not stopping.is_set():
            self._wake.clear()  # before looking, never after
            pause = await self._look()
            if cancelling():
                raise asyncio.CancelledError
            if not stopping.is_set():
                await self._wake.wait(pause)
        self._pulse.ended(self.name)  # a long drain is no standstill

    async def _look(self) -> float:
        """Claim what there is, and return for how many seconds there is no reason to look again, notifications aside."""
        self._running.limited = True  # until this look has found room for all that it might find
        rooms = self._running.rooms()
        if not rooms:
            self._listener.want(False)
            self._pulse.ran(self.name)
            return self._poll
        try:
            async with connection(self._pool) as db:
                if self._unsure:
                    await self._return_orphans(db)
                look = await self._claim(db, rooms)
        except TRANSIENT as error:
            failures = self._pulse.failed(self.name, error)
            self._unsure = True
            pause = backoff_pause(failures)
            self._telemetry.service_failed(self.name, error, failures=failures, again_in=pause)
            return pause
        self._pulse.ran(self.name)
        self._telemetry.service_ran(self.name)
        self._running.limited = self._on_idle is not None or not self._running.has_room_everywhere()
        if self._on_idle is not None and look.nothing and look.suspects:
            self._on_idle()
        if look.claimed >= STREAM:
            self._listener.want(False)
            return 0.0
        if not self._listener.armed:
            self._listener.want(True)
            if look.claimed:
                return 0.0
        pause = self._poll if look.next_in is None else min(self._poll, look.next_in.total_seconds())
        return max(0.0, pause if look.swept else min(pause, self._sweep_at - boottime()))

    async def _claim(self, db: Connection, rooms: dict[str, int]) -> Look:
        wanted = min(LARGEST, sum(rooms.values()))
        under_way = len(self._running)  # before looking: what the last job to end inserted is then seen
        look = Look()
        lanes = [(self._running.room(q), q, h, p, floor) for (q, h, p), floor in self._floors.items()]
        lanes = [lane for lane in lanes if lane[0] in rooms]
        # Without the sweep once a poll, a lane that fills every free slot would hide more urgent ones for as long as it lasts.
        if lanes and boottime() < self._swept + self._poll:
            found = await self._claim_lanes(db, rooms, lanes)
            look.claimed, look.next_in = len(found.claims), found.next_in
        began = boottime()
        rooms = self._running.rooms()
        if look.claimed >= wanted or began < self._sweep_at or not rooms:
            return look
        suspects = self._running.suspect is None and began >= self._suspects_at
        first = suspects and self._crowded_out
        if first:
            # Without this, a suspect would wait for as long as there is work that fills every slot.
            await self._claim_suspect(db, began)
            self._crowded_out = False
            if not (rooms := self._running.rooms()):
                return look
        self._forget_quiet_lanes(began)
        self._under_way += under_way
        after = self._last_queue
        try:
            look.claimed += await self._sweep(db, rooms, look)
        except TRANSIENT:
            self._last_queue = after  # those that come next have not been looked at
            raise
        if suspects and not first:
            self._crowded_out = not self._running.has_room_everywhere()
            if not self._crowded_out:
                look.suspects = True
                await self._claim_suspect(db, began)
        if not self._last_queue:
            look.swept = True
            look.nothing = not self._under_way and not self._refused
            self._under_way = 0
        took = boottime() - began
        # Were there no end to it, a process that was held still for ten seconds would claim next to nothing for a hundred.
        self._swept = began + took
        self._sweep_at = self._swept + min(took * DUTY, self._poll)
        return look

    async def _sweep(self, db: Connection, rooms: dict[str, int], look: Look) -> int:
        """Claim from all lanes; return how many."""
        lanes = self._all_lanes(rooms)
        shares = self._shares and "*" in rooms
        if shares and (boottime() >= self._list_at or not lanes):
            await self._list_other_queues(db)
            lanes = self._all_lanes(rooms)
        # Asked along with the claim: an idle daemon sends one statement at each poll, and not another one for its queues.
        known = sorted({*self._own_queues, *self._other_queues}) if shares and self._list_at else None
        found = await self._claim_lanes(db, rooms, lanes, known=known)
        claimed, look.next_in = len(found.claims), found.next_in
        if found.others and (rooms := self._running.rooms()):
            await self._list_other_queues(db)
            found = await self._claim_lanes(db, rooms, self._all_lanes(rooms))
            claimed, look.next_in = claimed + len(found.claims), found.next_in
        return claimed

    async def _list_other_queues(self, db: Connection) -> None:
        """List the next queues. Were it the first ones each time, no job in the others would ever be seen."""
        after = self._last_queue
        found = await queries.list_queues(db, after=after, limit=MOST_QUEUES)
        self._last_queue = found[-1] if len(found) == MOST_QUEUES else ""
        self._other_queues = [queue for queue in found if queue not in self._own_queues]
        # All of them are known: no need to list them again until there are others, but to forget those that have run dry.
        self._list_at = 0.0 if after or self._last_queue else boottime() + LISTED

    def _forget_quiet_lanes(self, now: float) -> None:
        for lane in [lane for lane, used in self._used.items() if now - used > QUIET]:
            del self._used[lane], self._floors[lane]

    async def _claim_suspect(self, db: Connection, now: float) -> None:
        """Claim one job that was lost twice in a row: it may have killed its workers, and runs here beside no other suspect."""
        everywhere = self._running.has_room_everywhere()
        rooms = dict.fromkeys(self._running.rooms(), 1)
        await self._claim_lanes(db, rooms, self._all_lanes(rooms), suspects=True)
        if self._running.suspect is None:
            self._suspects_at = now + (0 if self._on_idle else SUSPECTS if everywhere else self._poll)

    async def _claim_lanes(
        self,
        db: Connection,
        rooms: dict[str, int],
        lanes: list[Lane],
        *,
        suspects: bool = False,
        at_most: int = LARGEST,
        known: list[str] | None = None,
    ) -> Claimed:
        asked = boottime()  # before the claim is sent: by this clock our trust in it must end before the lease does
        if self._refused:
            self._refused = {lane: until for lane, until in self._refused.items() if until > asked}
            lanes = [lane for lane in lanes if lane[1:4] not in self._refused]
        if not lanes or not rooms or self._stopping.is_set():
            return Claimed([], next_in=None, others=False)
        total = 1 if suspects else min(at_most, sum(rooms.values()))
        try:
            found = await queries.claim_due_jobs(
                db,
                node=self._node,
                rooms=rooms,
                lanes=lanes,
                suspects=suspects,
                total=total,
                lease=self._lease,
                known=known,
            )
        except asyncpg.PostgresError as error:
            if not about_a_row(error) or len(self._refused) >= MOST_REFUSED:
                raise
            return await self._claim_in_halves(db, rooms, lanes, error, suspects=suspects, total=total)
        self.reached = boottime()
        self._under_way += len(found.claims)
        lease = self._lease.total_seconds()
        for claim in found.claims:
            own = lease if claim.lease is None else claim.lease.total_seconds()
            attempt = Attempt(claim, lease=own, asked=asked, suspect=suspects)
            self._running.add(attempt)  # takes the slot now, not when the task first runs
            self._start(attempt)
            if not suspects:
                lane = (claim.queue, claim.handler, claim.priority)
                if self._floors.get(lane, ANY_TIME) < claim.run_at:
                    self._floors[lane] = claim.run_at
                self._used[lane] = asked
        if found.claims:
            self._telemetry.jobs_claimed(found.claims)
        return found

    async def _claim_in_halves(
        self,
        db: Connection,
        rooms: dict[str, int],
        lanes: list[Lane],
        error: asyncpg.PostgresError,
        *,
        suspects: bool,
        total: int,
    ) -> Claimed:
        """Claim around the row that was refused, or else it would stop every daemon. What lies behind it in its lane waits."""
        if len(lanes) == total == 1:
            _, queue, handler, priority, _ = lanes[0]
            self._refused[queue, handler, priority] = boottime() + REFUSED
            self._telemetry.row_refused("claim", error, queue=queue, handler=handler, priority=priority)
            return Claimed([], next_in=None, others=False)
        middle = len(lanes) // 2
        halves, at_most = ([lanes[:middle], lanes[middle:]], total) if middle else ([lanes, lanes], total // 2)
        claims: list[Claim] = []
        soonest: timedelta | None = None
        for half in halves:
            if suspects and claims:
                break
            free = self._running.rooms()
            left = {room: min(1, free[room]) if suspects else free[room] for room in rooms if room in free}
            found = await self._claim_lanes(db, left, half, suspects=suspects, at_most=at_most)
            claims += found.claims
            soonest = min((each for each in (soonest, found.next_in) if each is not None), default=None)
        return Claimed(claims, next_in=soonest, others=False)

    def _all_lanes(self, rooms: Mapping[str, int]) -> list[Lane]:
        lanes = []
        for queue in self._own_queues + self._other_queues:
            room = self._running.room(queue)
            if room in rooms:
                lanes += [
                    (room, queue, handler, priority, ANY_TIME) for handler in self._handlers for priority in PRIORITIES
                ]
        return lanes

    async def _return_orphans(self, db: Connection) -> None:
        """Give back claims whose answer was lost with the connection: nobody would run them until their leases end."""
        known = [attempt.claim.fence_token for attempt in self._running.attempts]
        found = await queries.find_orphaned_claims(db, node=self._node, known=known)
        # What began here and was let go is no orphan, though nobody runs it: its lease settles it.
        self._running.let_go &= {token for _, token in found}
        orphans = [(job_id, token) for job_id, token in found if token not in self._running.let_go]
        if orphans:
            await queries.release_claims(db, node=self._node, claims=orphans)
            self._telemetry.orphans_released(len(orphans))
        self._unsure = False
