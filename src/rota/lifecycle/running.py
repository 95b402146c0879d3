"""The attempts that run on this node, and the slots that they occupy.

Only the main loop changes this state. The heartbeat's thread reads a `snapshot` and answers through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rota.domain.outcome import Interrupted
from rota.lifecycle.slots import AHEAD_SECONDS, Slots
from rota.lifecycle.suspects import Probation
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rota.domain.job import FenceToken
    from rota.handlers.attempt import Attempt
    from rota.lifecycle.wake import Wake


class Running:
    """The running attempts by fence token, and the slots of each queue."""

    def __init__(self, slots: Mapping[str, int], wake: Wake, *, grace: float) -> None:
        self._slots = {queue: Slots(size) for queue, size in slots.items()}
        self._wake = wake
        self._grace = grace
        self._attempts: dict[FenceToken, Attempt] = {}
        self._attempt_removed = asyncio.Event()
        self._limited = False
        """Whether the last look for jobs lacked slots, so that the dispatcher must look again when a slot is freed."""
        self._freed = False
        """Whether a slot has been freed since the last look began."""
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

    def groups(self) -> dict[str, int]:
        """Return queue -> free slots, for the queues with at least one."""
        return {queue: free for queue, slots in self._slots.items() if (free := slots.free) > 0}

    def claimable(self) -> dict[str, int]:
        """Return queue -> jobs to claim now, for the queues with at least one: the free slots, and jobs ahead of them."""
        return {queue: count for queue, slots in self._slots.items() if (count := slots.claimable) > 0}

    def begin_look(self) -> None:
        """Record that a look for jobs begins."""
        self._limited = self._freed = False

    def end_look(self, *, limited: bool) -> None:
        """Record that the look has ended. `limited`: it lacked slots, so freeing a slot wakes the dispatcher."""
        self._limited = limited
        if limited and self._freed:
            self._wake.set()

    def has_free_slots_everywhere(self) -> bool:
        """Return whether every queue has a free slot."""
        return all(slots.free > 0 or slots.size == 0 for slots in self._slots.values())

    def slots(self) -> dict[str, tuple[int, int]]:
        """Return queue -> (taken, free)."""
        return {queue: (slots.busy, slots.size - slots.busy) for queue, slots in self._slots.items()}

    def add(self, attempts: Sequence[Attempt], start: Callable[[Attempt], None]) -> None:
        """Occupy slots and start the attempts. Those without a slot start as soon as one is free, or are given back."""
        self._start = start
        now = boottime()
        waiting = False
        for attempt in attempts:
            self._attempts[attempt.claim.fence_token] = attempt
            if attempt.suspect:
                self.probation.add(attempt.claim.fence_token, attempt.suspect, attempt.claim_sent_at)
            if self._slots_of(attempt).take(attempt, now):
                attempt.has_slot = True
                start(attempt)
            else:
                waiting = True
        if waiting:
            asyncio.get_running_loop().call_later(AHEAD_SECONDS, self._give_back_waiting)

    def free_slot(self, attempt: Attempt) -> None:
        """Free the slot of an attempt whose handler has ended, for a waiting attempt or the dispatcher."""
        if attempt.has_slot:
            slots = self._slots_of(attempt)
            slots.unwritten += 1
            self._leave(attempt, slots)

    def remove(self, attempt: Attempt, *, settled: bool = True) -> None:
        """Forget the attempt."""
        if self._attempts.pop(attempt.claim.fence_token, None) is None:
            return
        if not settled:
            self.unsettled.add(attempt.claim.fence_token)
        slots = self._slots_of(attempt)
        if attempt.has_slot:
            self._leave(attempt, slots)
        else:
            slots.unwritten -= 1
        self._attempt_removed.set()
        if attempt.suspect:
            lost = not settled or attempt.stop_reason == "lease_lost"
            self.probation.remove(attempt.claim.fence_token, lost=lost)
            self._wake.set()
        else:
            self._wake_for(slots)

    def _wake_for(self, slots: Slots) -> None:
        if slots.claimable > 0:
            self._freed = True
            if self._limited:
                self._wake.set()

    def _leave(self, attempt: Attempt, slots: Slots) -> None:
        attempt.has_slot = False
        now = attempt.ended_at or boottime()
        following = slots.leave(now)
        if following is not None:
            slots.take(following, now)
            following.has_slot = True
            self._start(following)
        else:
            self._wake_for(slots)

    def _give_back_waiting(self) -> None:
        """End the attempts that wait for a slot before their handlers are called: their jobs are released."""
        for slots in self._slots.values():
            if slots.waiting and boottime() - slots.waiting[0].claim_sent_at >= AHEAD_SECONDS:
                for attempt in slots.give_up_waiting():
                    slots.unwritten += 1
                    attempt.interrupt(Interrupted(began=False), grace=self._grace)
                    self._start(attempt)

    def _slots_of(self, attempt: Attempt) -> Slots:
        return self._slots.get(attempt.claim.queue) or self._slots["*"]

    async def wait_until_empty(self) -> None:
        """Return once every attempt has been removed."""
        while self._attempts:
            self._attempt_removed.clear()
            await self._attempt_removed.wait()

    def interrupt_all(self) -> None:
        """Interrupt all attempts, because the daemon is stopping."""
        for attempt in list(self._attempts.values()):
            attempt.interrupt(Interrupted(began=attempt.handler_called), grace=self._grace)
        for slots in self._slots.values():
            for attempt in slots.give_up_waiting():
                slots.unwritten += 1
                self._start(attempt)
