"""Limit how many suspects run at once on one node. A suspect is a job that lost its worker twice in a row.

No database, no clock. The width is the number of suspects that may run at the same time. It starts at 1, grows by 1 with each
suspect that ends without a loss (so it doubles with each batch: 1, 2, 4, ...), and falls back to 1 after a loss.

A suspect that runs alone and is lost again is poison. If several suspects run when the worker is lost, the culprit is unknown. So
the claim reduces the losses of each by one: this loss buries none of them, and each runs alone the next time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.domain.job import Suspects

if TYPE_CHECKING:
    from rota.domain.job import FenceToken

MAX_WIDTH = 64
"""At most this many suspects run at once: if one kills the worker, all of them lose an attempt."""

SHARED_SECONDS = 10.0
"""How long suspects may join running ones. Without a limit, a suspect that must run alone might never start."""


class Probation:
    """The suspects that run on this node, and which suspects may start next."""

    def __init__(self) -> None:
        self.width = 1
        self._running: dict[FenceToken, Suspects] = {}
        self._join_until = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def requests(self, now: float) -> list[tuple[Suspects, int]]:
        """Return (kind, maximum number of jobs) of the claims to try, in this order, until one finds a job."""
        if not self._running:
            if self.width == 1:
                return [(Suspects.ANY, 1)]
            return [(Suspects.ALONE, 1), (Suspects.SHARED, self.width)]
        free = self.width - len(self._running)
        if free <= 0 or now >= self._join_until or any(kind != Suspects.SHARED for kind in self._running.values()):
            return []
        return [(Suspects.SHARED, free)]

    def add(self, token: FenceToken, kind: Suspects, now: float) -> None:
        """Record the start of a suspect."""
        if not self._running:
            self._join_until = now + SHARED_SECONDS
        self._running[token] = kind

    def remove(self, token: FenceToken, *, lost: bool) -> None:
        """Record the end of a suspect. `lost`: its lease was lost."""
        if self._running.pop(token, None) is not None:
            self.width = 1 if lost else min(self.width + 1, MAX_WIDTH)
