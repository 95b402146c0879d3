"""What becomes of a job after an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datetime import datetime, timedelta

Reason = Literal["permanent", "exhausted", "poison", "lost", "bad_payload", "expired"]


@dataclass(frozen=True, slots=True)
class Succeed:
    """Into the ledger."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Back to scheduled; the attempt counts. `delay` runs from the moment of writing, on the database's clock."""

    delay: timedelta
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Back to scheduled; the attempt is given back. With neither delay nor instant: when the lease ends."""

    delay: timedelta | None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Bury:
    """Into the dead letters."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel:
    """Into the ledger, as cancelled."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing is written: somebody else decides about this job, or it is settled already."""


Settlement = Succeed | Retry | Release | Bury | Cancel | Abandon
