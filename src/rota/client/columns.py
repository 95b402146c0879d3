"""The public columns of rota.jobs, as Python writes them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from rota.domain import payload as json_text
from rota.domain.validation import check_types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rota.domain.validation import Delivery


class Columns(TypedDict, total=False):
    """The keyword arguments of `enqueue`: the public columns of rota.jobs, and on_conflict. None means the default."""

    queue: str | None
    run_at: datetime | None
    priority: int | None
    unique_key: str | None
    on_conflict: Literal["keep", "replace", "queue_one", "error"] | None
    max_attempts: int | None
    backoff_base: timedelta | None
    backoff_cap: timedelta | None
    retry_for: timedelta | None
    timeout: timedelta | None
    lease: timedelta | None
    delivery: Delivery | None
    start_by: datetime | None
    idempotency_key: str | None
    meta: Mapping[str, Any] | None
    limit_key: str | None


COLUMNS = frozenset(Columns.__annotations__)

DAEMON_COLUMNS = frozenset({
    "job_id", "scheduled_for", "schedule_id", "created_at", "created_by", "state", "attempt", "losses", "releases", "fence_token",
    "leased_by", "lease_expires_at", "started_at", "checkpoint", "progress", "progress_note", "exclusive",
    "follow_up",
})  # fmt: skip
"""Columns that only daemons write."""


def option(name: str, value: Any) -> Any:
    """Return a column's value as JSON. Raises TypeError or ValueError for an invalid one, TypeError for an unknown column."""
    check_column(name)
    check_types(**{name: value})
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return json_text.interval_text(value)
        case _ if name == "meta":
            return json.loads(json_text.encode(value, what="meta"))
        case _:
            return value


def check_column(name: str) -> None:
    """Raise TypeError for a column that a client can't write, or that doesn't exist."""
    if name in DAEMON_COLUMNS:
        raise TypeError(f"rota.jobs.{name} is written by daemons only: leave it out")
    if name not in COLUMNS:
        close = get_close_matches(name, COLUMNS, 1)
        raise TypeError(f"rota.jobs has no public column {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
