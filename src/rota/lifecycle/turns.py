"""When to claim limited jobs, and which key's turn it is. Pure bookkeeping: no database; the caller passes the time in seconds.

Keys of one queue and priority take turns. A *round* visits each key once, from the cursor to the cursor; a long one takes several
claims. A round that has seen all keys has claimed what has a permit. Until something changes, another one would find nothing: a
permit is freed, a limit changes, a hold or interval ends, or a job is inserted. Of these, this node hears of all but the last while
it is busy and receives no notifications. So it then tries again as often as a tenth of the time allows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rota.db.queries import Cursor
from rota.supervision.loop import THROTTLE_FACTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rota.db.queries import LimitedClaims, WalkPosition

CONTENDED_SECONDS = 0.005
"""Pause before another claim if other sessions had all open keys locked. They hold the locks for the time of one claim."""


class Turns:
    """The cursors of one node, and the time of its next claim of limited jobs."""

    def __init__(self, *, poll: float) -> None:
        self._poll = poll
        self._at = math.inf
        """When to claim limited jobs at the latest; infinity: none were seen."""
        self._busy_at = math.inf
        """The same while this node receives no notifications."""
        self.open_groups: set[str] = set()
        """Slot groups whose last round has not seen all keys, so that more limited jobs may have a permit."""
        self.cursors: dict[tuple[str, int], Cursor] = {}
        """(slot group, priority) -> cursor with which the current round began."""
        self._next_cursors: dict[tuple[str, int], Cursor] = {}
        self.positions: dict[str, WalkPosition] = {}
        """Slot group -> where its round is to be resumed."""

    def is_due(self, free: Collection[str], now: float, *, notified: bool) -> bool:
        """Return whether to claim limited jobs for these groups, which have free slots. `notified`: inserts wake this node."""
        return not self.open_groups.isdisjoint(free) or now >= (self._at if notified else min(self._at, self._busy_at))

    def pause(self, free: Collection[str], now: float) -> float:
        """Return seconds until the next claim of limited jobs."""
        return 0.0 if not self.open_groups.isdisjoint(free) else max(0.0, self._at - now)

    def seen(self, now: float, *, limited: bool) -> None:
        """Record whether a claim of other jobs has seen limited jobs."""
        if not limited:
            self._at = self._busy_at = math.inf
            self.open_groups.clear()
        elif self._at == math.inf:
            self._at = now

    def wake(self) -> None:
        """Claim at the next look if there are limited jobs: a permit may be free, or a limit may have changed."""
        if self._at != math.inf:
            self._at = 0.0

    def claimed(
        self,
        found: LimitedClaims,
        slots: Mapping[str, int],
        group_of: Callable[[str], str],
        *,
        began: float,
        ended: float,
    ) -> None:
        """Record a claim for these slots: move the cursors, and set the time of the next one."""
        for claim, weight in zip(found.claimed.claims, found.weights, strict=True):
            place, key = (group_of(claim.queue), claim.priority), claim.limit_key or ""
            last = self._next_cursors.get(place) or self.cursors.get(place)
            if last is not None and last.left > 0 and (last.queue, last.key) == (claim.queue, key):
                self._next_cursors[place] = Cursor(claim.queue, key, last.left - 1)
            else:
                self._next_cursors[place] = Cursor(claim.queue, key, weight - 1)
        self.positions = {**self.positions, **found.stopped}
        for group, free in slots.items():
            if group not in found.stopped:
                self.positions.pop(group, None)
            if not free:
                self.open_groups.add(group)
            elif found.complete[group]:
                self.open_groups.discard(group)
            else:
                self.open_groups.add(group)
        for place in [place for place in self._next_cursors if place[0] not in self.positions]:
            self.cursors[place] = self._next_cursors.pop(place)
        if found.contended:
            self._at = ended + (0.0 if found.claimed.claims else CONTENDED_SECONDS)
        else:
            next_in = self._poll if found.claimed.next_in is None else found.claimed.next_in.total_seconds()
            self._at = ended + min(self._poll, max(0.0, next_in))
        self._busy_at = ended + min(self._poll, (ended - began) * THROTTLE_FACTOR)
