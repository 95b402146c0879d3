"""A claim, as the database hands it out, and the terms on which its job is retried."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from uuid import UUID

NodeId = NewType("NodeId", "UUID")
FenceToken = NewType("FenceToken", int)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Claim:
    """One row of `claim_due_jobs`. Payload, meta and checkpoint are still text: decoding them may fail, and is the attempt's."""

    job_id: int
    handler: str
    queue: str
    priority: int
    payload: str
    attempt: int
    fence_token: FenceToken
    run_at: datetime
    started_at: datetime
    timeout: timedelta | None
    extras: Extras | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What few jobs have; a claim without any of it carries none."""

    scheduled_for: datetime
    created_at: datetime
    schedule_id: int | None
    idempotency_key: str | None
    lease: timedelta
    meta: str | None
    checkpoint: str | None
    schedule: str | None = None
    """The schedule's name."""

    @classmethod
    def parse(cls, text: str) -> Extras:
        """Read what `claim_due_jobs` wrote: instants in microseconds, the lease in seconds."""
        given = json.loads(text)
        given["scheduled_for"] = _EPOCH + timedelta(microseconds=given["scheduled_for"])
        given["created_at"] = _EPOCH + timedelta(microseconds=given["created_at"])
        given["lease"] = timedelta(seconds=given["lease"])
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a job is retried, as its row says at the moment of deciding."""

    job_id: int
    fence_token: FenceToken
    leased_by: NodeId
    handler: str
    queue: str
    attempt: int
    max_attempts: int | None
    losses: int
    releases: int
    delivery: str | None
    backoff_base: timedelta | None
    backoff_cap: timedelta | None
    retry_left: timedelta | None = field(default=None)
    """How long from now the job may still be retried; None: no such limit."""
    schedule_id: int | None = None


def idempotency_key(claim: Claim, installation_id: str) -> str:
    """Return the key that is the same for all attempts of one fire, and of one job."""
    if claim.extras is None:
        return f"rota:{installation_id}:job:{claim.job_id}:{instant(claim.run_at)}"
    if claim.extras.idempotency_key is not None:
        return claim.extras.idempotency_key
    if claim.extras.schedule_id is not None:
        return f"rota:{installation_id}:{claim.extras.schedule_id}:{instant(claim.extras.scheduled_for)}"
    return f"rota:{installation_id}:job:{claim.job_id}:{instant(claim.extras.scheduled_for)}"


def instant(moment: datetime) -> str:
    """Write an instant in UTC with microseconds, always alike: `2026-01-31T08:00:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
