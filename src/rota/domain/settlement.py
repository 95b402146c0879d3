"""The decision about a job after an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datetime import datetime, timedelta

Reason = Literal["permanent", "exhausted", "poison", "lost", "bad_payload", "expired"]


@dataclass(frozen=True, slots=True)
class Succeed:
    """Move the job to the ledger as succeeded."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Schedule the job again; the attempt counts. `delay` is added to the database's now() when the settlement is written."""

    delay: timedelta
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Schedule the job again; the attempt does not count. Without delay and instant, the job is due when its lease ends."""

    delay: timedelta | None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Bury:
    """Make the job a dead letter."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel:
    """Move the job to the ledger as cancelled."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Write nothing: another node decides about this job, or it is already settled."""


Settlement = Succeed | Retry | Release | Bury | Cancel | Abandon
