"""Enqueue from Python, in the caller's transaction: the job exists when, and only when, that commits.

`enqueue` and `enqueue_many` are for asyncpg, psycopg's AsyncConnection, SQLAlchemy's AsyncConnection and AsyncSession;
`enqueue_sync` and `enqueue_many_sync` for psycopg's Connection, SQLAlchemy's Connection and Session, and Django's connection.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rota import payload as json_text
from rota.db import drivers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rota.db.drivers import AsyncConn, Query, SyncConn

    Encode = Callable[[Any], str]


class Columns(TypedDict, total=False):
    """What `enqueue` takes by name: the public columns of rota.jobs, and on_conflict. None: the default."""

    queue: str | None
    run_at: datetime | None
    priority: int | None
    unique_key: str | None
    on_conflict: Literal["keep", "replace", "error"] | None
    max_attempts: int | None
    backoff_base: timedelta | None
    backoff_cap: timedelta | None
    retry_for: timedelta | None
    timeout: timedelta | None
    lease: timedelta | None
    delivery: Literal["at_least_once", "at_most_once"] | None
    start_by: datetime | None
    idempotency_key: str | None
    meta: Mapping[str, Any] | None


COLUMNS = frozenset(Columns.__annotations__)

OWN = frozenset({"run_at", "priority", "unique_key", "idempotency_key", "meta"})
"""What may differ from job to job in `enqueue_many`, given as a function of the payload."""

BATCH = 2000
"""Jobs in a statement of `enqueue_many`, and …"""

BATCH_BYTES = 4 << 20
"""… about how many bytes."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The job's number, and whether this call made it: False when a live job already had the unique_key."""

    job_id: int
    created: bool


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
    text, options = _job(payload, columns)
    return _enqueued(await drivers.fetch(conn, "enqueue_job", handler, text, options, caller="rota.enqueue"))


def enqueue_sync(conn: SyncConn, handler: str, payload: Any = None, **columns: Unpack[Columns]) -> Enqueued:
    """Insert a job on a blocking connection, in whatever transaction is open on it; all else is as with `enqueue`."""
    drivers.check_sync(conn, "rota.enqueue_sync")
    text, options = _job(payload, columns)
    return _enqueued(drivers.fetch_sync(conn, "enqueue_job", handler, text, options, caller="rota.enqueue_sync"))


async def enqueue_many(
    conn: AsyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload, about as fast as COPY does, and return how many were made.

    `columns` are those of `enqueue`, for all jobs alike. `unique_key`, `idempotency_key`, `run_at`, `priority` and `meta` may also
    be functions of the payload: `unique_key=lambda order: f"order:{order['id']}"`. A live job with the same unique_key is
    kept, and no job is made in its place. Thousands go in one statement; all are in the caller's transaction: without one,
    an error leaves what was inserted before it. `encode` turns a payload into JSON text, where it isn't JSON.
    The errors are those of `enqueue`.
    """
    drivers.check_async(conn, "rota.enqueue_many")
    created = 0
    for query, options, jobs, sent in _batches(payloads, columns, encode or encode_payload):
        row = await drivers.fetch(conn, query, handler, options, jobs, caller="rota.enqueue_many")
        created += sent if row is None or query == "enqueue_jobs" else row[0]
    return created


def enqueue_many_sync(
    conn: SyncConn, handler: str, payloads: Iterable[Any], *, encode: Encode | None = None, **columns: Any
) -> int:
    """Insert a job for each payload on a blocking connection; all else is as with `enqueue_many`."""
    drivers.check_sync(conn, "rota.enqueue_many_sync")
    created = 0
    for query, options, jobs, sent in _batches(payloads, columns, encode or encode_payload):
        row = drivers.fetch_sync(conn, query, handler, options, jobs, caller="rota.enqueue_many_sync")
        created += sent if row is None or query == "enqueue_jobs" else row[0]
    return created


class Encoded(str):
    """A payload that is JSON text already, checked by whoever made it."""

    __slots__ = ()


def encode_payload(payload: Any) -> str:
    """Return a payload as JSON text: what is JSON as it is, dataclasses and pydantic models by their fields."""
    if isinstance(payload, Encoded):
        return str(payload)  # not a type of ours: drivers go by the type
    if isinstance(payload, BaseModel) or (dataclasses.is_dataclass(payload) and not isinstance(payload, type)):
        payload = to_jsonable_python(payload, by_alias=True)
    return json_text.encode(payload)


def _enqueued(row: Any) -> Enqueued:
    return Enqueued(row[0], row[1])


def _job(payload: Any, columns: Mapping[str, Any]) -> tuple[str | None, str]:
    text = None if payload is None else encode_payload(payload)
    return text, json.dumps({name: _option(name, value) for name, value in columns.items() if value is not None})


def _batches(
    payloads: Iterable[Any], columns: Mapping[str, Any], encode: Encode
) -> Iterator[tuple[Query, str, str, int]]:
    if columns.get("on_conflict") not in {None, "keep"}:
        raise TypeError("enqueue_many keeps live jobs with the same unique_key: on_conflict can only be 'keep'")
    shared, own = {}, {}
    for name, value in columns.items():
        if value is None or name == "on_conflict":
            continue
        if callable(value) and name in OWN:
            own[name] = value
        elif name in {"unique_key", "idempotency_key"}:
            raise TypeError(
                f"{name} must differ from job to job: give a function of the payload, {name}=lambda payload: …"
            )
        else:
            shared[name] = _option(name, value)
    options = json.dumps(shared)
    query: Query = "enqueue_keyed_jobs" if own else "enqueue_jobs"
    left = iter(payloads)
    jobs: list[str] = []
    size = 0
    while chunk := list(islice(left, BATCH)):
        for payload in chunk:
            text = "null" if payload is None else encode(payload)
            if own:
                text = _with_own(text, payload, own)
            jobs.append(text)
            size += len(text)
            if size > BATCH_BYTES:
                yield query, options, f"[{','.join(jobs)}]", len(jobs)
                jobs, size = [], 0
        if jobs:
            yield query, options, f"[{','.join(jobs)}]", len(jobs)
            jobs, size = [], 0


def _with_own(text: str, payload: Any, own: Mapping[str, Callable[[Any], Any]]) -> str:
    columns = {name: _option(name, value) for name, of in own.items() if (value := of(payload)) is not None}
    return f'{{"payload":{text}' + (f",{json.dumps(columns)[1:]}" if columns else "}")


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
            return json.loads(json_text.encode(value, what="meta"))
        case bool():
            raise TypeError(f"{name} can't be a bool")
        case str() | int():
            return value
        case _:
            raise TypeError(f"{name} can't be a {type(value).__name__}")
