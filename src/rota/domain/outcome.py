"""The outcomes of an attempt. A job's failure is a value here; an exception means a bug in rota."""

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
        """The decoded result."""
        return None if self.result is None else json.loads(self.result)


@dataclass(frozen=True, slots=True)
class Committed:
    """The handler committed its effect and the job's completion together, so nothing is left to settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised an error. `after` or `at` replaces the job's backoff, if one is set."""

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
    """Set if the handler did not stop: it still runs in this thread or task, and its lease is about to end."""


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to be called again later, without using up an attempt."""

    after: timedelta | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """The handler closed the key of its job. The job runs again when the hold ends, without using up an attempt."""

    key: str
    run_at: datetime
    """The job's run_at, which it keeps: so it is still the first of its key."""
    after: timedelta | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler cancelled the job, or a client requested it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The daemon is shutting down. `began`: the handler had been called."""

    began: bool
    still_running: bool = False
    """The handler can't be stopped before the process ends. Its lease must expire before the job runs again."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """This node lost the lease, or can't be sure that it still has it."""


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A reaper found the lease expired: the node that held it died or was cut off."""


Outcome = (
    Succeeded
    | Committed
    | Failed
    | Undecodable
    | TimedOut
    | Snoozed
    | Held
    | Cancelled
    | Interrupted
    | LeaseLost
    | HolderLost
)

StopReason = Literal["cancel", "drain", "timeout", "lease_lost"]
