"""Enqueue from Python, in the caller's transaction: the job exists when, and only when, that commits.

`enqueue` and `enqueue_many` are for asyncpg, psycopg's AsyncConnection, SQLAlchemy's AsyncConnection and AsyncSession;
`enqueue_sync` and `enqueue_many_sync` for psycopg's Connection, SQLAlchemy's Connection and Session, and Django's connection.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rota.client.columns import option
from rota.client.many import Many
from rota.db import copying, drivers
from rota.domain import payload as json_text
from rota.domain.validation import check_handler_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rota.client.columns import Columns
    from rota.client.many import Encode
    from rota.db.drivers import AsyncConn, SyncConn


JobOutcome = Literal["created", "kept", "replaced"]


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The job's number, whether this call made it, and what became of a live job that had the unique_key already."""

    job_id: int
    created: bool
    outcome: JobOutcome = field(default="created", compare=False)
    """created: there was no such job. replaced: the new values took its place. kept: it stays as it is, because
    on_conflict is 'keep' or because it is running."""


async def enqueue(conn: AsyncConn, handler: str, payload: Any = None, **columns: Unpack[Columns]) -> Enqueued:
    """Insert a job on an asynchronous connection, in whatever transaction is open on it.

    `payload` is anything that is JSON, a dataclass or a pydantic model. `columns` are the public columns of rota.jobs: `queue`,
    `run_at` and `start_by` (datetimes with a zone), `priority` (0 first, 9 last), `unique_key` with `on_conflict` ('keep',
    'replace', 'error'), `max_attempts`, `backoff_base`, `backoff_cap`, `retry_for`, `timeout` and `lease` (timedeltas),
    `delivery`, `idempotency_key`, `meta`.
    Raises TypeError for a wrong connection, an unknown column or a value of the wrong kind, ValueError for a datetime without a
    zone, InvalidPayload for what is not JSON or can't be stored, Refused for what the database says no to. Nothing is sent
    before all of it is checked, and other errors of the driver leave as they are.
    """
    drivers.check_async(conn, "rota.enqueue")
    check_handler_name(handler)
    text, options = _job(payload, columns)
    return _enqueued(await drivers.fetch(conn, "enqueue_job", handler, text, options, caller="rota.enqueue"))


def enqueue_sync(conn: SyncConn, handler: str, payload: Any = None, **columns: Unpack[Columns]) -> Enqueued:
    """Insert a job on a blocking connection, in whatever transaction is open on it; all else is as with `enqueue`."""
    drivers.check_sync(conn, "rota.enqueue_sync")
    check_handler_name(handler)
    text, options = _job(payload, columns)
    return _enqueued(drivers.fetch_sync(conn, "enqueue_job", handler, text, options, caller="rota.enqueue_sync"))


async def enqueue_many(
    conn: AsyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload, about as fast as COPY does, and return how many were made.

    `columns` are those of `enqueue`, for all jobs alike. `unique_key`, `idempotency_key`, `run_at`, `priority` and `meta` may also
    be functions of the payload: `unique_key=lambda order: f"order:{order['id']}"`. A live job with the same unique_key is
    kept, and no job is made in its place. `encode` turns a payload into JSON text, where it isn't JSON.
    The errors are those of `enqueue`, and name the payload: `payloads[7]: …`. On asyncpg and psycopg an error takes back all
    jobs of the call and leaves the caller's transaction usable. SQLAlchemy, and jobs with a unique_key, go by statements of
    thousands, sent when all payloads have been checked: only without a transaction can one that the database refuses leave
    earlier ones behind.
    """
    drivers.check_async(conn, "rota.enqueue_many")
    many = Many(handler, payloads, columns, encode or encode_payload)
    if copying.can_copy(conn) and not many.keyed:
        await copying.copy_jobs(conn, many.copied, many.copies())
        return many.sent
    for batch in list(many.statements()):
        with batch.named():
            many.made(batch, await drivers.fetch(conn, batch.query, *batch.arguments, caller="rota.enqueue_many"))
    return many.sent


def enqueue_many_sync(
    conn: SyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload on a blocking connection; all else is as with `enqueue_many`. Django goes by statements."""
    drivers.check_sync(conn, "rota.enqueue_many_sync")
    many = Many(handler, payloads, columns, encode or encode_payload)
    if copying.can_copy(conn) and not many.keyed:
        copying.copy_jobs_sync(conn, many.copied, many.copies())
        return many.sent
    for batch in list(many.statements()):
        with batch.named():
            many.made(batch, drivers.fetch_sync(conn, batch.query, *batch.arguments, caller="rota.enqueue_many_sync"))
    return many.sent


class Encoded(str):
    """A payload that is JSON text already, checked by whoever made it."""

    __slots__ = ()


def encode_payload(payload: Any) -> str:
    """Return a payload as JSON text: what is JSON as it is, dataclasses and pydantic models by their fields."""
    if isinstance(payload, dict):
        return json_text.encode(payload)  # nearly all of them: the questions below take as long as the answer
    if isinstance(payload, Encoded):
        return str(payload)  # not a type of ours: drivers go by the type
    if isinstance(payload, BaseModel) or (dataclasses.is_dataclass(payload) and not isinstance(payload, type)):
        payload = to_jsonable_python(payload, by_alias=True)
    return json_text.encode(payload)


def _enqueued(row: Any) -> Enqueued:
    return Enqueued(row[0], row[1], row[2])


def _job(payload: Any, columns: Mapping[str, Any]) -> tuple[str | None, str]:
    text = None if payload is None else encode_payload(payload)
    return text, json.dumps({name: option(name, value) for name, value in columns.items() if value is not None})
