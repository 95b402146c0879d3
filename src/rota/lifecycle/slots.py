"""The slots of one queue, or of all queues without slots of their own (`*`), and the jobs claimed ahead of them.

Claiming costs more than running a job that does nothing. So while all jobs of a group end within milliseconds, the group claims
more jobs than it has slots. Those ahead wait here for a slot; one that got none within AHEAD_SECONDS is given back.
No database; the caller passes the time in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.handlers.attempt import Attempt

AHEAD_SECONDS = 0.05
"""Longest time that a claimed job waits for a slot."""

MAX_AHEAD = 900
"""Most jobs claimed ahead of the slots."""

MAX_AHEAD_BYTES = 1 << 20
"""Most bytes of payload claimed ahead, if the next jobs are as large as the last ones."""

MAX_UNWRITTEN = 500
"""Most attempts of a group whose handlers have ended and whose outcomes are not written, before it claims less."""


@dataclass(slots=True)
class Slots:
    """The slots of one group. A group with one slot claims nothing ahead: it does one job after another."""

    size: int
    busy: int = 0
    """Slots whose handler runs."""
    unwritten: int = 0
    """Attempts whose handler has ended and whose outcome is not written. They occupy no slot."""
    waiting: deque[Attempt] = field(default_factory=deque)
    """Attempts ahead: claimed, and not started."""
    ahead: int = 0
    """How many jobs to claim ahead of the slots."""
    _began: float = 0.0
    """When the first attempt of this batch started. A batch ends when no slot is busy."""
    _count: int = 0
    _bytes: int = 0

    @property
    def free(self) -> int:
        """Free slots, fewer while too many outcomes are unwritten: the database is slower than the handlers."""
        unwritten = self.unwritten - (MAX_UNWRITTEN if self.size > 1 else 0)
        return self.size - self.busy - len(self.waiting) - max(0, unwritten)

    @property
    def claimable(self) -> int:
        """Jobs to claim now, with those ahead. Nothing while many jobs wait, so that claims stay large."""
        count = self.free + self.ahead
        return count if not self.waiting or count >= (self.size + self.ahead) // 2 else 0

    def take(self, attempt: Attempt, now: float) -> bool:
        """Occupy a slot for the attempt, or let it wait. Return whether it may start."""
        if self.busy >= self.size:
            self.waiting.append(attempt)
            return False
        if not self.busy:
            self._began, self._count, self._bytes = now, 0, 0
        self.busy += 1
        self._count += 1
        self._bytes += len(attempt.payload)
        return True

    def leave(self, now: float) -> Attempt | None:
        """Free a slot. Return the waiting attempt to start next, for which a slot must be taken."""
        self.busy -= 1
        if self.waiting:
            return self.waiting.popleft()
        if not self.busy:
            self._learn(now)
        return None

    def give_up_waiting(self) -> list[Attempt]:
        """Return all waiting attempts, which are to be given back, and claim nothing ahead until a batch ends quickly."""
        given_back = list(self.waiting)
        self.waiting.clear()
        self.ahead = 0
        return given_back

    def _learn(self, now: float) -> None:
        """Set `ahead` to what the group can do in half of AHEAD_SECONDS, judged by the batch that has ended."""
        if self._count < self.size or self.size == 1:
            return  # too few to judge by
        seconds = max(now - self._began, 1e-6)
        possible = int(self._count * AHEAD_SECONDS / 2 / seconds) - self.size
        in_bytes = MAX_AHEAD_BYTES * self._count // (self._bytes + 1)
        self.ahead = max(0, min(possible, in_bytes, MAX_AHEAD, max(self.size, self.ahead * 2)))
