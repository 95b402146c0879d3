"""What an attempt did. A failed job is a value here; an exception is a fault of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned; `result` is JSON, or None."""

    result: str | None = None

    @property
    def value(self) -> Any:
        """The result, decoded."""
        return None if self.result is None else json.loads(self.result)


@dataclass(frozen=True, slots=True)
class Committed:
    """Effect and completion were committed together: nothing is left to settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised. `after` or `at` is what it wants for the next attempt, instead of the job's backoff."""

    kind: str
    text: str
    permanent: bool = False
    after: timedelta | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The payload or the checkpoint could not be decoded; the handler was not called."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The attempt ran longer than the job's timeout, and was interrupted."""

    timeout: timedelta
    after: timedelta | None = None
    abandoned: Literal["thread", "task"] | None = None
    """What the handler still runs in, if it did not stop: its lease is about to end."""


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler wants to be called again later, and this not to count."""

    after: timedelta | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job has become moot: the handler said so, or somebody asked for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The daemon is stopping. `began`: the handler had been called."""

    began: bool
    still_running: bool = False
    """The handler can't be stopped and will die with the process: its lease must end before the job runs again."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The claim is no longer ours, or can't be trusted to be."""


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A reaper found the lease expired: whoever held it has died, or was cut off."""


Outcome = (
    Succeeded | Committed | Failed | Undecodable | TimedOut | Snoozed | Cancelled | Interrupted | LeaseLost | HolderLost
)

StopReason = Literal["cancel", "drain", "timeout", "lease_lost"]
