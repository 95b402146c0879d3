"""A claim as the database returns it, and the retry settings of its job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from uuid import UUID

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

NodeId = NewType("NodeId", "UUID")
FenceToken = NewType("FenceToken", int)


class Suspects(IntEnum):
    """Which suspects a claim takes. A suspect is a job that lost its worker twice in a row."""

    NONE = 0
    """Only jobs that are not suspects."""
    ANY = 1
    """Any suspect. It runs while no other suspect runs on the node."""
    ALONE = 2
    """Suspects that must run alone: they were lost beside others before, or are on their last attempt."""
    SHARED = 3
    """Suspects that may run beside each other. Their next loss doesn't count towards the limit of losses."""


@dataclass(slots=True)
class Claim:
    """One row of `claim_due_jobs` or `claim_limited_jobs`.

    Payload, meta and checkpoint are undecoded text: the attempt decodes them, as that may fail.
    """

    job_id: int
    handler: str
    queue: str
    priority: int
    payload: str | None
    """None if too large to be returned with the claim. It is then read when the attempt starts."""
    attempt: int
    fence_token: FenceToken
    run_at: datetime
    started_at: datetime
    timeout: timedelta | None
    schedule_id: int | None = None
    scheduled_for: datetime | None = None
    """None if equal to `run_at`."""
    created_at: datetime | None = None
    """None if before the year 1000 or after 8000."""
    lease: timedelta | None = None
    """None: the daemon's default lease."""
    idempotency_key: str | None = None
    meta: str | None = None
    checkpoint: str | None = None
    schedule: str | None = None
    """The schedule's name."""
    limit_key: str | None = None
    is_limited: bool = False
    """Whether it holds a permit: it has a key, or its handler or queue has a limit. Such jobs are claimed by claim_limited_jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The retry settings and counters of a job, read when its settlement is decided."""

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
    retry_left: timedelta | None = None
    """How much longer the job may be retried; None without a limit."""
    retry_until: datetime | None = None
    """`retry_left` as an instant."""
    schedule_id: int | None = None


def idempotency_key(claim: Claim, installation_id: str) -> str:
    """Return the key that is the same for every attempt of a job: the key of its row, or one derived from other columns.

    A standby promoted while it lags issues the same job_ids again, so a derived key contains the row's creation time. The key of a
    fire does not: every job that runs this fire must have the same key.
    """
    if claim.idempotency_key is not None:
        return claim.idempotency_key
    scheduled_for = instant(claim.scheduled_for or claim.run_at)
    if claim.schedule_id is not None:
        return f"rota:{installation_id}:{claim.schedule_id}:{scheduled_for}"
    created_us = 0 if claim.created_at is None else (claim.created_at - EPOCH) // timedelta(microseconds=1)
    return f"rota:{installation_id}:job:{claim.job_id}:{scheduled_for}:{created_us}"


def instant(moment: datetime) -> str:
    """Format an instant in UTC, always with microseconds: `2026-01-31T08:00:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
