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
        "checkpoint",
        "claim",
        "claim_sent_at",
        "committed",
        "committing",
        "completing",
        "ended_at",
        "handler_called",
        "has_slot",
        "interruption",
        "lease",
        "on_interrupt",
        "payload",
        "settle_crashes",
        "settlements_ignored",
        "stop_by",
        "stop_flag",
        "stuck",
        "suspect",
        "task",
        "trusted_until",
    )

    def __init__(self, claim: Claim, *, lease: float, claim_sent_at: float, suspect: Suspects) -> None:
        self.claim = claim
        self.lease = lease
        self.suspect = suspect
        self.claim_sent_at = claim_sent_at
        """When the claim was sent to the database, in seconds of boottime()."""
        self.trusted_until = claim_sent_at + lease - safety_margin(lease)
        """Until then the lease certainly holds. The heartbeat moves it."""
        self.task: asyncio.Task[None] | None = None
        self.on_interrupt: Callable[[], None] | None = None
        """Stops the handler, where cancelling the task would not."""
        self.interruption: Outcome | None = None
        """The outcome if the handler obeys the order to stop; None while there is no such order."""
        self.stop_by: float | None = None
        self.stop_flag: threading.Event | None = None
        self.handler_called = False
        self.has_slot = False
        self.completing = False
        """job.complete() was called. Only the database knows whether its transaction commits."""
        self.committing = False
        """A COMMIT that settles the job is on its way. Forbids interrupting, and a missing row is no lost lease."""
        self.committed = False
        """The COMMIT succeeded: nothing is left to settle."""
        self.stuck = False
        """The handler has not stopped by `stop_by`."""
        self.abandoned = False
        """It was settled although its handler still runs."""
        self.ended_at = 0.0
        self.settle_crashes = 0
        self.settlements_ignored = 0
        self.checkpoint = claim.checkpoint
        self.payload = claim.payload or ""
        """The payload as text; of a large one, only while the attempt runs."""

    def interrupt(self, outcome: Outcome, *, grace: float) -> None:
        """Ask the handler to stop. Only the first call has an effect. It does not wait: the executor sees whether it stopped."""
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
        """Return the earliest time on this node's clock at which the lease may end, after the heartbeat's extensions.

        `grace`: seconds beyond the job's timeout for which the heartbeat may extend the lease.
        """
        extended = self.trusted_until + safety_margin(self.lease)
        if self.claim.timeout is not None:
            extended = min(extended, self.claim_sent_at + self.claim.timeout.total_seconds() + grace)
        return max(self.claim_sent_at + self.lease, extended)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the handler was asked to stop, as `job.stop_reason` reports it."""
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


@lru_cache(maxsize=64)  # called for each attempt, nearly always with the daemon's lease
def safety_margin(lease: float) -> float:
    """Return the safety margin in seconds: this node treats a lease as ended that much before the database does."""
    return min(5.0, max(0.5, lease / 10))
