"""Enqueue from Python in the caller's transaction: the job exists if, and only if, that transaction commits.

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
from rota.client.many import ManyJobs
from rota.db import copying, drivers
from rota.domain import payload as json_text
from rota.domain.validation import check_handler_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rota.client.columns import Columns
    from rota.client.many import Encode
    from rota.db.drivers import AsyncConn, SyncConn


JobOutcome = Literal["created", "kept", "replaced", "queued"]


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The result of an enqueue: the job's number, and how the call dealt with a live job of the same unique_key."""

    job_id: int
    created: bool
    outcome: JobOutcome = field(default="created", compare=False)
    """created: no live job had the unique_key. replaced: the live job got the new values. kept: the live job is unchanged,
    because on_conflict is 'keep' or because it is running. queued: with on_conflict='queue_one', the new values run as a job after
    the running one, which is `job_id`."""


async def enqueue(conn: AsyncConn, handler: str, payload: Any = None, **columns: Unpack[Columns]) -> Enqueued:
    """Insert a job on an asynchronous connection, in the transaction that is open on it.

    `payload` is anything that is JSON, a dataclass or a pydantic model. `columns` are the public columns of rota.jobs: `queue`,
    `run_at` and `start_by` (datetimes with a zone), `priority` (0 first, 9 last), `unique_key` with `on_conflict` ('keep',
    'replace', 'queue_one', 'error'), `max_attempts`, `backoff_base`, `backoff_cap`, `retry_for`, `timeout` and `lease`
    (timedeltas), `delivery`, `idempotency_key`, `meta`, `limit_key` (the key whose limit in rota.limits applies to the job).
    Raises TypeError for a wrong connection, an unknown column or a value of the wrong kind, ValueError for a datetime without a
    zone, InvalidPayload for a payload that is not JSON or can't be stored, Refused for values that the database rejects. All
    arguments are checked before anything is sent. Other errors of the driver propagate unchanged.
    """
    drivers.check_async(conn, "rota.enqueue")
    check_handler_name(handler)
    text, options = _job(payload, columns)
    return _enqueued(await drivers.fetch(conn, "enqueue_job", handler, text, options, caller="rota.enqueue"))


def enqueue_sync(conn: SyncConn, handler: str, payload: Any = None, **columns: Unpack[Columns]) -> Enqueued:
    """Insert a job on a blocking connection, in the transaction that is open on it. Otherwise it works like `enqueue`."""
    drivers.check_sync(conn, "rota.enqueue_sync")
    check_handler_name(handler)
    text, options = _job(payload, columns)
    return _enqueued(drivers.fetch_sync(conn, "enqueue_job", handler, text, options, caller="rota.enqueue_sync"))


async def enqueue_many(
    conn: AsyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload, about as fast as COPY, and return the number of jobs inserted.

    `columns` are those of `enqueue`, and apply to all jobs. `unique_key`, `idempotency_key`, `run_at`, `priority`, `meta` and
    `limit_key` may also be functions of the payload: `unique_key=lambda order: f"order:{order['id']}"`. If a live job has the
    same unique_key, it is kept and no job is inserted. `encode` turns a payload that isn't JSON into JSON text.
    The errors are those of `enqueue`, and name the payload: `payloads[7]: …`. On asyncpg and psycopg, an error undoes all
    inserts of the call and leaves the caller's transaction usable. On SQLAlchemy, and with a unique_key, statements of thousands
    of jobs are sent once all payloads are checked. Without a transaction, jobs of earlier statements stay if a later one fails.
    """
    drivers.check_async(conn, "rota.enqueue_many")
    many = ManyJobs(handler, payloads, columns, encode or encode_payload)
    if copying.can_copy(conn) and not many.has_unique_keys:
        await copying.copy_jobs(conn, many.copy_columns, many.copies())
        return many.sent
    for batch in list(many.statements()):
        with batch.naming_payloads():
            many.count_inserted(
                batch, await drivers.fetch(conn, batch.query, *batch.arguments, caller="rota.enqueue_many")
            )
    return many.sent


def enqueue_many_sync(
    conn: SyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload on a blocking connection, as `enqueue_many` does. Django uses statements instead of COPY."""
    drivers.check_sync(conn, "rota.enqueue_many_sync")
    many = ManyJobs(handler, payloads, columns, encode or encode_payload)
    if copying.can_copy(conn) and not many.has_unique_keys:
        copying.copy_jobs_sync(conn, many.copy_columns, many.copies())
        return many.sent
    for batch in list(many.statements()):
        with batch.naming_payloads():
            many.count_inserted(
                batch, drivers.fetch_sync(conn, batch.query, *batch.arguments, caller="rota.enqueue_many_sync")
            )
    return many.sent


class Encoded(str):
    """A payload that is already checked JSON text."""

    __slots__ = ()


def encode_payload(payload: Any) -> str:
    """Return a payload as JSON text. Dataclasses and pydantic models become objects."""
    if isinstance(payload, dict):
        return json_text.encode(payload)  # nearly all payloads: the checks below take as long as encoding
    if isinstance(payload, Encoded):
        return str(payload)  # a plain str: drivers choose the encoding by the type
    if isinstance(payload, BaseModel) or (dataclasses.is_dataclass(payload) and not isinstance(payload, type)):
        payload = to_jsonable_python(payload, by_alias=True)
    return json_text.encode(payload)


def _enqueued(row: Any) -> Enqueued:
    return Enqueued(row[0], row[1], row[2])


def _job(payload: Any, columns: Mapping[str, Any]) -> tuple[str | None, str]:
    text = None if payload is None else encode_payload(payload)
    return text, json.dumps({name: option(name, value) for name, value in columns.items() if value is not None})
