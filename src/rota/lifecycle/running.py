"""The attempts that run on this node, and the slots that they occupy.

Only the main loop changes this state. The heartbeat's thread reads a `snapshot` and answers through `call_soon_threadsafe`.
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
    """The running attempts by fence token, and the free slots of each queue."""

    def __init__(self, slots: Mapping[str, int], wake: Wake, *, grace: float) -> None:
        self._slots = dict(slots)
        self._free = dict(slots)
        self._wake = wake
        self._grace = grace
        self._attempts: dict[FenceToken, Attempt] = {}
        self._attempt_removed = asyncio.Event()
        self.limited = True
        """Whether the last look for jobs lacked slots, so that the dispatcher must look again when a slot is freed."""
        self.probation = Probation()
        self.unsettled: set[FenceToken] = set()
        """Attempts that ended here without a settlement. Their rows may still name this node as their owner."""

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def attempts(self) -> Iterable[Attempt]:
        """The running attempts."""
        return self._attempts.values()

    def snapshot(self) -> tuple[Attempt, ...]:
        """Return a copy of the running attempts. Callable from any thread: copying a dict's values is atomic."""
        return tuple(self._attempts.values())

    def room(self, queue: str) -> str:
        """Return the queue whose slots a job of this queue occupies: `*` for queues without slots of their own."""
        return queue if queue in self._slots else "*"

    def rooms(self) -> dict[str, int]:
        """Return queue -> free slots, for the queues with at least one."""
        return {queue: free for queue, free in self._free.items() if free > 0}

    def has_room_everywhere(self) -> bool:
        """Return whether every queue has a free slot."""
        return all(free > 0 or self._slots[queue] == 0 for queue, free in self._free.items())

    def slots(self) -> dict[str, tuple[int, int]]:
        """Return queue -> (taken, free)."""
        return {queue: (size - self._free[queue], self._free[queue]) for queue, size in self._slots.items()}

    def add(self, attempt: Attempt) -> None:
        """Occupy a slot at once: the attempt's task may start later."""
        self._attempts[attempt.claim.fence_token] = attempt
        self._free[self.room(attempt.claim.queue)] -= 1
        if attempt.suspect:
            self.probation.add(attempt.claim.fence_token, attempt.suspect, attempt.claim_sent_at)

    def remove(self, attempt: Attempt, *, settled: bool = True) -> None:
        """Free the attempt's slot, and wake the dispatcher if it lacked slots."""
        if self._attempts.pop(attempt.claim.fence_token, None) is None:
            return
        if not settled:
            self.unsettled.add(attempt.claim.fence_token)
        self._free[self.room(attempt.claim.queue)] += 1
        self._attempt_removed.set()
        if attempt.suspect:
            lost = not settled or attempt.stop_reason == "lease_lost"
            self.probation.remove(attempt.claim.fence_token, lost=lost)
            self._wake.set()
        elif self.limited:
            self._wake.set()

    async def wait_until_empty(self) -> None:
        """Return once every attempt has been removed."""
        while self._attempts:
            self._attempt_removed.clear()
            await self._attempt_removed.wait()

    def interrupt_all(self) -> None:
        """Interrupt all attempts, because the daemon is stopping."""
        for attempt in list(self._attempts.values()):
            attempt.interrupt(Interrupted(began=attempt.handler_called), grace=self._grace)
