"""Remember the rows for which the database refuses an operation, so that `rota check` can name them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rota.runtime.clock import boottime

MAX_REMEMBERED = 1000
MAX_REPORTED = 20

FORGET_SECONDS = 60.0
"""Forget a row after this time without a refusal. Operations are retried sooner, so by then the row was accepted."""


@dataclass(slots=True)
class RefusedRow:
    """A refused row: the error's type, and the first and last refusal in seconds of boottime()."""

    kind: str
    first: float
    last: float
    keep_seconds: float


class RefusedRows:
    """The rows that the database refused recently. Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, int], RefusedRow] = {}
        """(operation, "job" or "schedule", its id) -> the refusal"""

    def add(self, doing: str, what: str, number: int, kind: str, *, again_in: float = 0.0) -> None:
        """Record a refusal. The operation is not tried again for `again_in` seconds."""
        now, key = boottime(), (doing, what, number)
        row = self._rows.get(key)
        if row is None and len(self._rows) >= MAX_REMEMBERED:
            self._forget(now)
            if len(self._rows) >= MAX_REMEMBERED:
                return
        first = row.first if row is not None and now - row.last < row.keep_seconds else now
        self._rows[key] = RefusedRow(kind, first=first, last=now, keep_seconds=FORGET_SECONDS + again_in)

    def as_json(self) -> str | None:
        """Return the oldest refusals as a JSON array, or None if there are none."""
        now = boottime()
        self._forget(now)
        oldest = sorted(list(self._rows.items()), key=lambda item: item[1].first)[:MAX_REPORTED]  # noqa: C414  a snapshot
        if not oldest:
            return None
        return json.dumps(
            [
                {"doing": doing, "what": what, "id": number, "kind": row.kind, "seconds": round(now - row.first, 1)}
                for (doing, what, number), row in oldest
            ]
        )

    def _forget(self, now: float) -> None:
        for key, row in list(self._rows.items()):
            if now - row.last >= row.keep_seconds:
                self._rows.pop(key, None)
