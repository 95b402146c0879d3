"""Which lanes the dispatcher searches, and when. Pure bookkeeping: no database; the caller passes the time in seconds.

A lane is one queue, handler and priority. A slot group is the slots of one queue; the group `*` has those of all other queues.

A *floored* search reads only busy lanes (lanes with a recent claim), from the last claimed run_at on. So dead rows before the
floor cost nothing. A *sweep* reads all lanes of a group from the beginning of time. It finds the jobs that floors hide: late
commits, back-dated rows, and urgent jobs in lanes that were quiet. A group with free slots is swept at least once a poll interval,
independently of other groups; `*` is swept one page of queues at a time. A group without free slots is swept as soon as a slot is
free. All further sweeps are optional and use at most 10 % of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rota.db.queries import ANY_TIME
from rota.supervision.loop import THROTTLE_FACTOR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from rota.db.queries import Lane, ListedQueue
    from rota.domain.job import Claim

PRIORITIES = range(10)

SHARED_GROUP = "*"
"""The group for the jobs of all queues that have no slots of their own."""

BUSY_CLAIM_SIZE = 8
"""A look that claims at least this many jobs makes the node busy. It then looks again at once, without notifications."""

LANE_IDLE_SECONDS = 60.0
"""Seconds without a claim after which only sweeps search a lane."""

MAX_BUSY_LANES = 1000
"""Most lanes that floored searches look at. Clients may use any number of queues; sweeps find the jobs of the other lanes."""

MAX_LISTED_QUEUES = 2000
"""Most queues in one page of the queues that share the group `*`."""

MAX_SEARCHED_QUEUES = 200
"""Most queues of a page in which this node may find jobs. Clients may use any number of queues, also with unknown handlers."""

LIST_SECONDS = 20.0
"""The queues that share `*` are listed again after this time, to drop those that have become empty."""


@dataclass(slots=True)
class BusyLane:
    """A lane with a recent claim."""

    floor: datetime
    used_at: float


@dataclass(slots=True)
class SlotGroup:
    """When a group was swept, and how its last search ended."""

    sweep_due_at: float = 0.0
    """When the next sweep is due at the latest."""
    swept_in: int = 0
    """The number of the look that completed the last sweep of all lanes."""
    sweep_began_in: int = 0
    """The number of the look that began that sweep: an earlier one if the queues of `*` fill several pages."""
    filled: bool = False
    """Whether the last search claimed as many jobs as it asked for, so that more may be due."""


class ForeignQueues:
    """The queues that share the group `*`, one page at a time. With a single page, the claim reports whether there are new ones."""

    def __init__(self) -> None:
        self.page: dict[str, Sequence[str]] = {}
        """The handlers to search in each queue."""
        self.list_at = 0.0
        """When to list again; 0: before each sweep, because there are many queues."""
        self.after = ""
        """The last queue of this page, if there are more pages; else empty."""
        self.pages = 1
        """Pages in the last complete round, or in the current one if it has more already."""
        self.page_number = 0
        self.round_began_in = 0

    def listed(
        self, found: Sequence[ListedQueue], own: Collection[str], handlers: Sequence[str], *, now: float, look: int
    ) -> None:
        """Store the next page: the queues after `self.after`."""
        if not self.after:
            self.page_number, self.round_began_in = 0, look
        self.page_number += 1
        others = [(queue, present) for queue, present in found if queue not in own]
        searched = [(queue, present) for queue, present in others if present]
        last = found[-1][0] if len(found) == MAX_LISTED_QUEUES else ""
        if len(searched) > MAX_SEARCHED_QUEUES:
            del searched[MAX_SEARCHED_QUEUES:]
            last = searched[-1][0]
        if self.after or last or len(others) > MAX_SEARCHED_QUEUES:
            self.page, self.list_at = dict(searched), 0.0
        else:  # the first job of any handler may come before they are listed again
            self.page, self.list_at = dict.fromkeys((queue for queue, _ in others), handlers), now + LIST_SECONDS
        self.after = last
        self.pages = max(self.pages, self.page_number) if last else self.page_number

    def rewind(self, after: str) -> None:
        """List the page after `after` again, because its search failed."""
        if after != self.after:
            self.after, self.list_at = after, 0.0
            self.page_number -= 1


class Lanes:
    """The lanes of one node: floors, sweeps, and the pause until the next look."""

    def __init__(self, handlers: Collection[str], slots: Mapping[str, int], *, poll: float) -> None:
        self.handlers = sorted(handlers)
        self._own = dict.fromkeys(queue for queue in slots if queue != SHARED_GROUP)
        self._groups = {group: SlotGroup() for group, size in slots.items() if size > 0}
        self._poll = poll
        self._busy: dict[tuple[str, str, int], BusyLane] = {}
        """Least recently used first."""
        self._optional_sweep_at = 0.0
        self._look = 0
        self._active_in = 0
        """The last look at which something ran here or was claimed."""
        self._was_busy = False
        self.foreign = ForeignQueues()

    # One look.

    def begin_look(self, now: float, *, active: bool) -> None:
        """Begin a look. `active`: something runs here, which may insert jobs that this look can't see yet."""
        self._look += 1
        if active:
            self._active_in = self._look
        while self._busy:
            lane = next(iter(self._busy))
            if len(self._busy) <= MAX_BUSY_LANES and now - self._busy[lane].used_at <= LANE_IDLE_SECONDS:
                break
            del self._busy[lane]

    def groups_to_sweep_first(self, free: Iterable[str], now: float) -> set[str]:
        """Return the groups of the look's first search that are to be swept. The others get a floored search.

        If one group is due, all groups are swept in the same statement. A group that was full is swept, too, unless claims come so
        fast that sweeps would use more than a tenth of the time: urgent jobs in quiet lanes then get the slot that has become free.
        """
        free = set(free)
        may = now >= self._optional_sweep_at
        due = {group for group in free if now >= self._groups[group].sweep_due_at}
        if due:
            return free if may else due
        return {group for group in free if self._groups[group].filled} if may and not self._was_busy else set()

    def groups_to_sweep_then(self, free: Iterable[str], now: float) -> set[str]:
        """Return the groups to sweep after the first search: those in which it left slots free, unless they were swept."""
        if now < self._optional_sweep_at:
            return set()
        return {group for group in free if not self._groups[group].filled and not self._is_swept(self._groups[group])}

    def busy_lanes(self, free: Collection[str]) -> list[Lane]:
        """Return the lanes of a floored search in these groups."""
        lanes = [(self.group(q), q, h, p, lane.floor) for (q, h, p), lane in self._busy.items()]
        return [lane for lane in lanes if lane[0] in free]

    def all_lanes(self, groups: Collection[str]) -> list[Lane]:
        """Return all lanes of these groups, without floors; of `*`, those of the current page."""
        foreign = self.foreign.page if SHARED_GROUP in groups else {}
        return [
            (self.group(queue), queue, handler, priority, ANY_TIME)
            for queue, handlers in (dict.fromkeys(self._own, self.handlers) | foreign).items()
            if self.group(queue) in groups
            for handler in handlers
            for priority in PRIORITIES
        ]

    def lanes(self, free: Collection[str], sweeping: Collection[str]) -> list[Lane]:
        """Return the lanes of a search in the groups `free`, which sweeps the groups `sweeping`."""
        swept = self.all_lanes(sweeping)
        queues = {lane[1] for lane in swept}
        return swept + [lane for lane in self.busy_lanes(free) if lane[1] not in queues]

    def known_queues(self) -> list[str] | None:
        """Return all queues that a claim need not report, or None if they are listed before each sweep anyway."""
        return sorted({*self._own, *self.foreign.page}) if self.foreign.list_at else None

    def must_list_queues(self, sweeping: Collection[str], now: float) -> bool:
        """Return whether the queues of `*` have to be listed before a sweep of these groups."""
        return SHARED_GROUP in sweeping and (now >= self.foreign.list_at or not self.all_lanes(sweeping))

    def queues_listed(self, found: Sequence[ListedQueue], now: float) -> None:
        """Store the answer of list_queues.sql for the queues after `foreign.after`."""
        self.foreign.listed(found, self._own, self.handlers, now=now, look=self._look)

    def claimed(self, claims: Iterable[Claim], now: float) -> None:
        """Raise the floors of the lanes in which these jobs were claimed."""
        floors: dict[tuple[str, str, int], datetime] = {}
        for claim in claims:
            lane = (claim.queue, claim.handler, claim.priority)
            if floors.get(lane, ANY_TIME) <= claim.run_at:
                floors[lane] = claim.run_at
        for lane, floor in floors.items():
            known = self._busy.pop(lane, None)  # and put back as the one used last
            self._busy[lane] = BusyLane(floor if known is None else max(known.floor, floor), now)
        self._active_in = self._look

    def found_due(self, lanes: Iterable[Lane], now: float) -> None:
        """Search these lanes at each look from their first due job on: the sweep that found it may have had no slot for it."""
        for _, queue, handler, priority, first in lanes:
            lane = self._busy.setdefault((queue, handler, priority), BusyLane(first, now))
            lane.floor = min(lane.floor, first)

    def searched(
        self,
        asked: Mapping[str, int],
        claimed: Mapping[str, int],
        sweeping: Collection[str],
        *,
        began: float,
        ended: float,
    ) -> None:
        """Record a search: the jobs that it asked for and claimed in each group, and the groups that it swept."""
        for name, slots in asked.items():
            self._groups[name].filled = claimed.get(name, 0) >= slots
        if not sweeping:
            return
        took = ended - began
        # Capped: after a pause of 10 s during a sweep, the next one would otherwise come after 100 s.
        self._optional_sweep_at = ended + min(took * THROTTLE_FACTOR, self._poll)
        # Twice per poll interval while sweeps are cheap: a job that commits just after one is then found within a poll interval.
        interval = max(min(max(took * THROTTLE_FACTOR, self._poll / 2), self._poll), took * 2)
        for name in sweeping:
            group = self._groups[name]
            foreign = self.foreign if name == SHARED_GROUP else None
            group.sweep_due_at = began + interval / (foreign.pages if foreign else 1)
            if foreign is None or not foreign.after:
                group.swept_in = self._look
                group.sweep_began_in = foreign.round_began_in if foreign and foreign.pages > 1 else self._look

    def end_look(self, claimed: int) -> None:
        """End a look that claimed so many jobs."""
        self._was_busy = claimed >= BUSY_CLAIM_SIZE

    # After a look.

    def pause(self, free: Iterable[str], now: float) -> float:
        """Return seconds until the next look in the groups that have free slots; 0 if more may be due."""
        pause = self._poll
        for name in free:
            group = self._groups[name]
            if group.filled:
                return 0.0
            if not self._is_swept(group):
                pause = min(pause, max(0.0, self._optional_sweep_at - now))
        return pause

    def is_idle(self) -> bool:
        """Return whether all lanes have been swept since something last ran here or was claimed."""
        return all(group.sweep_began_in > self._active_in for group in self._groups.values())

    def group(self, queue: str) -> str:
        """Return the group whose slots a job of this queue takes."""
        return queue if queue in self._own else SHARED_GROUP

    def _is_swept(self, group: SlotGroup) -> bool:
        return group.swept_in == self._look
