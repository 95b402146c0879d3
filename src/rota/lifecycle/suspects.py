"""Probation: how many suspects, jobs that lost their worker twice in a row, may run at once on one node.

Pure bookkeeping: no database, no clock. Width is the number of suspects that may run side by side. It starts at one, grows by one
with each suspect that its worker survives (so it doubles with each batch: 1, 2, 4, ...), and falls back to one after a loss.

A suspect that runs alone and is lost again is poison. Of suspects that run side by side nobody knows which one killed the worker,
so the claim takes one loss off each: this loss buries none of them, and every one of them runs alone the next time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.domain.job import Suspects

if TYPE_CHECKING:
    from rota.domain.job import FenceToken

MAX_WIDTH = 64
"""Most suspects side by side: as many lose an attempt if one of them kills the worker."""

SHARED_SECONDS = 10.0
"""Seconds for which suspects join those that already run. Without a limit, a suspect that must run alone would never start."""


class Probation:
    """The suspects that run on this node, and which ones may start next."""

    def __init__(self) -> None:
        self.width = 1
        self._members: dict[FenceToken, Suspects] = {}
        self._closes_at = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def requests(self, now: float) -> list[tuple[Suspects, int]]:
        """Return which claims of suspects to try, in this order until one of them finds a job: kind and most jobs of each."""
        if not self._members:
            if self.width == 1:
                return [(Suspects.ANY, 1)]
            return [(Suspects.ALONE, 1), (Suspects.SHARED, self.width)]
        free = self.width - len(self._members)
        if free <= 0 or now >= self._closes_at or any(kind != Suspects.SHARED for kind in self._members.values()):
            return []
        return [(Suspects.SHARED, free)]

    def add(self, token: FenceToken, kind: Suspects, now: float) -> None:
        """Note that a suspect starts."""
        if not self._members:
            self._closes_at = now + SHARED_SECONDS
        self._members[token] = kind

    def remove(self, token: FenceToken, *, lost: bool) -> None:
        """Note that a suspect has ended; `lost`: its lease was lost."""
        if self._members.pop(token, None) is not None:
            self.width = 1 if lost else min(self.width + 1, MAX_WIDTH)
