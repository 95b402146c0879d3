"""The attempts that run on this node, and the slots they take.

Only the main loop changes them. The heartbeat's thread takes a `snapshot` and answers through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rota.domain.outcome import Interrupted
from rota.lifecycle.suspects import Probation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rota.domain.job import FenceToken
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.wake import Wake


class Running:
    """The attempts under way, by fence token, and the free slots of each queue."""

    def __init__(self, slots: Mapping[str, int], wake: Wake, *, grace: float) -> None:
        self._slots = dict(slots)
        self._free = dict(slots)
        self._wake = wake
        self._grace = grace
        self._attempts: dict[FenceToken, Attempt] = {}
        self._left = asyncio.Event()
        self.limited = True
        """Whether the last look for jobs found fewer slots than it wanted, so that a freed one is a reason to look again."""
        self.probation = Probation()
        self.let_go: set[FenceToken] = set()
        """Attempts that ended here and are not settled by us, though their rows may still say that they are ours."""

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def attempts(self) -> Iterable[Attempt]:
        """All attempts under way."""
        return self._attempts.values()

    def snapshot(self) -> tuple[Attempt, ...]:
        """Return the attempts under way, for another thread to read: copying a dict's values is atomic."""
        return tuple(self._attempts.values())

    def room(self, queue: str) -> str:
        """Return whose slots a job of this queue takes: its own, or those that all other queues share."""
        return queue if queue in self._slots else "*"

    def rooms(self) -> dict[str, int]:
        """Return queue -> free slots, of those that have any."""
        return {queue: free for queue, free in self._free.items() if free > 0}

    def has_room_everywhere(self) -> bool:
        """Return whether every queue has a free slot."""
        return all(free > 0 or self._slots[queue] == 0 for queue, free in self._free.items())

    def slots(self) -> dict[str, tuple[int, int]]:
        """Return queue -> (taken, free)."""
        return {queue: (size - self._free[queue], self._free[queue]) for queue, size in self._slots.items()}

    def add(self, attempt: Attempt) -> None:
        """Take a slot for it, now and not when its task first runs."""
        self._attempts[attempt.claim.fence_token] = attempt
        self._free[self.room(attempt.claim.queue)] -= 1
        if attempt.suspect:
            self.probation.add(attempt.claim.fence_token, attempt.suspect, attempt.started)

    def remove(self, attempt: Attempt, *, settled: bool = True) -> None:
        """Free its slot, and have the dispatcher look."""
        if self._attempts.pop(attempt.claim.fence_token, None) is None:
            return
        if not settled:
            self.let_go.add(attempt.claim.fence_token)
        self._free[self.room(attempt.claim.queue)] += 1
        self._left.set()
        if attempt.suspect:
            lost = not settled or attempt.stop_reason == "lease_lost"
            self.probation.remove(attempt.claim.fence_token, lost=lost)
            self._wake.set()
        elif self.limited:
            self._wake.set()

    async def wait_until_empty(self) -> None:
        """Return once every attempt has ended and is settled."""
        while self._attempts:
            self._left.clear()
            await self._left.wait()

    def interrupt_all(self) -> None:
        """Cut whatever still runs, because the daemon has to go."""
        for attempt in list(self._attempts.values()):
            attempt.interrupt(Interrupted(began=attempt.began), grace=self._grace)
