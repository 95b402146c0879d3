"""One execution of a job on this node, from its claim to its settlement, and how it is asked to stop."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

from rota.domain.outcome import Cancelled, Interrupted, LeaseLost, Outcome, StopReason, TimedOut
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Mapping

    from rota.domain.job import Claim, Suspects


STOP_OUTCOMES: Mapping[StopReason, Outcome] = {
    "cancel": Cancelled("cancellation was requested"),
    "drain": Interrupted(began=True),
    "timeout": TimedOut(timedelta(0)),
    "lease_lost": LeaseLost(),
}
"""An interruption for each stop reason, for attempts outside of a daemon."""


class Attempt:
    """One execution of a job, from its claim to its settlement."""

    __slots__ = (
        "abandoned",
        "began",
        "checkpoint",
        "claim",
        "committed",
        "committing",
        "completing",
        "ended_at",
        "interruption",
        "lease",
        "on_interrupt",
        "payload",
        "settle_crashes",
        "started",
        "stop_by",
        "stop_flag",
        "stuck",
        "suspect",
        "task",
        "trusted_until",
    )

    def __init__(self, claim: Claim, *, lease: float, asked: float, suspect: Suspects) -> None:
        self.claim = claim
        self.lease = lease
        self.suspect = suspect
        self.started = asked
        self.trusted_until = asked + lease - margin(lease)
        self.task: asyncio.Task[None] | None = None
        self.on_interrupt: Callable[[], None] | None = None
        self.interruption: Outcome | None = None
        self.stop_by: float | None = None
        self.stop_flag: threading.Event | None = None
        self.began = self.committed = self.committing = self.completing = self.stuck = False
        self.abandoned = False
        self.ended_at = 0.0
        self.settle_crashes = 0
        self.checkpoint = claim.checkpoint
        self.payload = claim.payload or ""
        """The payload as text; of a large one, only while the attempt runs."""

    def interrupt(self, outcome: Outcome, *, grace: float) -> None:
        """Ask the handler to stop. The first reason stands; whether it worked, the executor sees."""
        if self.interruption is not None or self.committing or self.committed or self.ended_at:
            return
        self.interruption = outcome
        self.stop_by = boottime() + grace
        if self.stop_flag is not None:
            self.stop_flag.set()
        if self.on_interrupt is not None:
            self.on_interrupt()
        elif self.task is not None:
            self.task.cancel()

    def lease_ends_at(self, grace: float) -> float:
        """Return the earliest moment at which the lease may end, on this node's clock, as the heartbeat has extended it.

        `grace`: how many seconds beyond the job's timeout the heartbeat asked for.
        """
        extended = self.trusted_until + margin(self.lease)
        if self.claim.timeout is not None:
            extended = min(extended, self.started + self.claim.timeout.total_seconds() + grace)
        return max(self.started + self.lease, extended)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the handler was asked to stop, in the words of `job.stop_reason`."""
        match self.interruption:
            case Cancelled():
                return "cancel"
            case Interrupted():
                return "drain"
            case TimedOut():
                return "timeout"
            case LeaseLost():
                return "lease_lost"
            case _:
                return None


@lru_cache(maxsize=64)  # each attempt asks, and nearly all have the daemon's lease
def margin(lease: float) -> float:
    """Return how much earlier than the database we take a lease to have ended, in seconds."""
    return min(5.0, max(0.5, lease / 10))
