"""Enqueue from Python, on the caller's connection and in the caller's transaction: the job exists if, and only if, that commits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import asyncpg

from rota.db import queries
from rota.payload import encode

if TYPE_CHECKING:
    from rota.db.pool import Connection

COLUMNS = frozenset(
    {
        "queue",
        "run_at",
        "priority",
        "unique_key",
        "on_conflict",
        "max_attempts",
        "backoff_base",
        "backoff_cap",
        "retry_for",
        "timeout",
        "lease",
        "delivery",
        "start_by",
        "idempotency_key",
        "meta",
    }
)
"""What `enqueue` takes by name, beside handler and payload: the public columns of rota.jobs, and on_conflict."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The job's number, and whether this call made it: False when a live job already had the unique_key."""

    job_id: int
    created: bool


async def enqueue(conn: Connection, handler: str, payload: Any = None, **columns: Any) -> Enqueued:
    """Insert a job on an asyncpg connection, in whatever transaction is open on it.

    `payload` is anything that is JSON. `columns` are the public columns of rota.jobs: `queue`, `run_at` and `start_by` (datetimes
    with a zone), `priority` (0 first, 9 last), `unique_key` with `on_conflict` ('keep', 'replace', 'error'), `max_attempts`,
    `backoff_base`, `backoff_cap`, `retry_for`, `timeout` and `lease` (timedeltas), `delivery`, `idempotency_key`, `meta`.
    Raises TypeError for a wrong connection, an unknown column or a value of the wrong kind, ValueError for a datetime without a
    zone, InvalidPayload for what is not JSON or can't be stored; what the database refuses leaves as asyncpg's own error.
    """
    if not isinstance(conn, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise TypeError(
            f"rota.enqueue takes an asyncpg connection, not {type(conn).__module__}.{type(conn).__qualname__}"
        )
    text = None if payload is None else encode(payload)
    options = {name: _option(name, value) for name, value in columns.items() if value is not None}
    job_id, created = await queries.enqueue_job(conn, handler=handler, payload=text, options=json.dumps(options))
    return Enqueued(job_id, created)


def _option(name: str, value: Any) -> Any:
    if name not in COLUMNS:
        close = get_close_matches(name, COLUMNS, 1)
        raise TypeError(f"rota.jobs has no public column {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
    match value:
        case datetime():
            if value.tzinfo is None:
                raise ValueError(
                    f"{name} must have a zone, or nobody knows which instant it means: datetime.now(UTC), not now()"
                )
            return value.isoformat()
        case timedelta():
            return f"{value // timedelta(microseconds=1)} microseconds"
        case _ if name == "meta":
            return json.loads(encode(value, what="meta"))
        case str() | int():
            return value
        case _:
            raise TypeError(f"{name} can't be a {type(value).__name__}")
