"""Insert rows in any state, with any age, and read the state of a job.

Instants are offsets from the database's now(): `run_at=timedelta(seconds=-5)` was due five seconds ago.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from asyncpg import Connection, Record

NODE = UUID("00000000-0000-4000-8000-000000000001")
OTHER_NODE = UUID("00000000-0000-4000-8000-000000000002")

FIVE_SECONDS_AGO = timedelta(seconds=-5)
THIRTY_SECONDS = timedelta(seconds=30)
NO_DELAY = timedelta(0)


class NewJob(NamedTuple):
    """The id of an inserted job, and its fence token if it has been claimed."""

    job_id: int
    fence_token: int | None


class RunningJob(NamedTuple):
    """The id and fence token of an inserted running job."""

    job_id: int
    fence_token: int


async def make_job(
    conn: Connection[Record],
    *,
    state: Literal["scheduled", "running"] = "scheduled",
    handler: str = "h",
    run_at: timedelta = FIVE_SECONDS_AGO,
    attempt: int = 0,
    **columns: Any,
) -> NewJob:
    """Insert a job.

    With `attempt`, it has been claimed before and waits for its retry. `columns` are those of rota.jobs. For a running
    job, `make_running_job` fills in what a claim writes.
    """
    if state == "running":
        return NewJob(*await make_running_job(conn, handler=handler, run_at=run_at, attempt=attempt or 1, **columns))
    (new_job,) = await make_jobs(conn, 1, handler=handler, run_at=run_at, attempt=attempt, **columns)
    return new_job


async def make_running_job(
    conn: Connection[Record],
    *,
    handler: str = "h",
    run_at: timedelta = FIVE_SECONDS_AGO,
    lease: timedelta = THIRTY_SECONDS,
    node: UUID = NODE,
    attempt: int = 1,
    **columns: Any,
) -> RunningJob:
    """Insert a job as if `node` had claimed it. `lease` is the remaining time, negative if the lease has expired."""
    (new_job,) = await make_running_jobs(
        conn, 1, handler=handler, run_at=run_at, lease=lease, node=node, attempt=attempt, **columns
    )
    return new_job


async def make_jobs(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    run_at: timedelta = FIVE_SECONDS_AGO,
    step: timedelta = NO_DELAY,
    attempt: int = 0,
    **columns: Any,
) -> list[NewJob]:
    """Insert many equal jobs, each due `step` later than the one before."""
    if attempt:
        columns.setdefault("max_attempts", 20)
    rows = await _insert_jobs(
        conn,
        count,
        {"handler": handler, "attempt": attempt, **columns},
        {"run_at": run_at},
        step=step,
        token=attempt > 0,
    )
    return [NewJob(row["job_id"], row["fence_token"]) for row in rows]


async def make_running_jobs(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    run_at: timedelta = FIVE_SECONDS_AGO,
    lease: timedelta = THIRTY_SECONDS,
    node: UUID = NODE,
    attempt: int = 1,
    **columns: Any,
) -> list[RunningJob]:
    """Insert many jobs as if `node` had claimed them."""
    values = {
        "handler": handler,
        "attempt": attempt,
        "state": "running",
        "leased_by": node,
        "delivery": "at_least_once",
        "max_attempts": 20,
        "backoff_base": timedelta(seconds=5),
        "backoff_cap": timedelta(hours=1),
        "lease": timedelta(seconds=30),
        **columns,
    }
    instants = {"run_at": run_at, "lease_expires_at": lease, "started_at": lease - THIRTY_SECONDS}
    rows = await _insert_jobs(conn, count, values, instants, step=NO_DELAY, token=True)
    return [RunningJob(row["job_id"], row["fence_token"]) for row in rows]


async def make_dead_letter(
    conn: Connection[Record],
    *,
    handler: str = "h",
    reason: str = "exhausted",
    delivery: str = "at_least_once",
    finished_at: timedelta = NO_DELAY,
    **columns: Any,
) -> int:
    """Insert a dead letter with a value in every column that a redrive keeps; return its job_id."""
    (job_id,) = await make_dead_letters(
        conn, 1, handler=handler, reason=reason, delivery=delivery, finished_at=finished_at, **columns
    )
    return job_id


async def make_dead_letters(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    finished_at: timedelta = NO_DELAY,
    step: timedelta = NO_DELAY,
    **columns: Any,
) -> list[int]:
    """Insert many equal dead letters, each `step` later than the one before; return their job_ids."""
    values: dict[str, Any] = {
        "handler": handler,
        "queue": "default",
        "priority": 5,
        "exclusive": columns.get("schedule_id") is not None,
        "created_by": "somebody",
        "payload": '{"n": 1}',
        "delivery": "at_least_once",
        "attempt": 20,
        "losses": 1,
        "releases": 2,
        "max_attempts": 20,
        "node": NODE,
        "backoff_base": timedelta(seconds=5),
        "backoff_cap": timedelta(hours=1),
        "retry_for": timedelta(minutes=1),
        "timeout": timedelta(seconds=10),
        "lease": timedelta(seconds=30),
        "idempotency_key": "mine",
        "meta": '{"tenant": 7}',
        "checkpoint": '{"done": 3}',
        "reason": "exhausted",
        "error_kind": "ValueError",
        "error": "it broke",
        **columns,
    }
    instants = {
        "run_at": timedelta(days=-30),
        "scheduled_for": timedelta(days=-30),
        "created_at": timedelta(days=-31),
        "started_at": finished_at - THIRTY_SECONDS,
        "finished_at": finished_at,
    }
    columns_sql, values_sql, arguments = _columns_and_values(values, instants, step=step)
    rows = await conn.fetch(
        f"""
        insert into rota.dead_letters (job_id, fence_token, {columns_sql})
        select nextval('rota.jobs_job_id_seq'), nextval('rota.fence_tokens'), {values_sql}
        from generate_series(0, $1::int - 1) as n
        returning job_id
        """,
        count,
        *arguments,
    )
    return [row["job_id"] for row in rows]


async def make_ledger_row(
    conn: Connection[Record],
    *,
    outcome: str = "succeeded",
    finished_at: timedelta = NO_DELAY,
    handler: str = "h",
    **columns: Any,
) -> RunningJob:
    """Insert the ledger row of a job that has ended."""
    (new_job,) = await make_ledger_rows(conn, 1, outcome=outcome, finished_at=finished_at, handler=handler, **columns)
    return new_job


async def make_ledger_rows(
    conn: Connection[Record],
    count: int,
    *,
    outcome: str = "succeeded",
    finished_at: timedelta = NO_DELAY,
    handler: str = "h",
    **columns: Any,
) -> list[RunningJob]:
    """Insert many equal ledger rows."""
    values = {"handler": handler, "queue": "default", "outcome": outcome, "attempts": 1, "node": NODE, **columns}
    instants = {"scheduled_for": finished_at - THIRTY_SECONDS, "started_at": finished_at, "finished_at": finished_at}
    columns_sql, values_sql, arguments = _columns_and_values(values, instants, step=NO_DELAY)
    rows = await conn.fetch(
        f"""
        insert into rota.job_runs (job_id, fence_token, {columns_sql})
        select nextval('rota.jobs_job_id_seq'), nextval('rota.fence_tokens'), {values_sql}
        from generate_series(0, $1::int - 1) as n
        returning job_id, fence_token
        """,
        count,
        *arguments,
    )
    return [RunningJob(row["job_id"], row["fence_token"]) for row in rows]


async def make_attempts(
    conn: Connection[Record], count: int, *, job_id: int = 1, finished_at: timedelta = NO_DELAY, outcome: str = "failed"
) -> None:
    """Insert failed attempts of one job."""
    await conn.execute(
        """
        insert into rota.attempts (job_id, fence_token, attempt, node, started_at, finished_at, outcome)
        select $2, nextval('rota.fence_tokens'), n, $3, now() + $4::interval, now() + $4::interval, $5
        from generate_series(1, $1::int) as n
        """,
        count,
        job_id,
        NODE,
        finished_at,
        outcome,
    )


async def make_handler(conn: Connection[Record], handler: str = "h", **columns: Any) -> None:
    """Register a handler, as a daemon does at its start. Only jobs of registered handlers can be claimed."""
    values = {"handler": handler, **columns}
    columns_sql, values_sql, arguments = _columns_and_values(values, {"seen_at": NO_DELAY}, step=NO_DELAY, first=1)
    await conn.execute(
        f"insert into rota.handlers ({columns_sql}) select {values_sql} on conflict do nothing",
        *arguments,
    )


async def register_daemon(
    conn: Connection[Record],
    *,
    handlers: Sequence[str] = ("h",),
    queues: Sequence[str] = ("default",),
    tzdata: str | None = None,
) -> None:
    """Insert the row of a daemon that counts as alive during the test."""
    await conn.execute(
        """
        insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, tzdata, seen_at)
        values (gen_random_uuid(), 'here', 1, '0', 'shop', $1, $2, '{"default": 5}', $3, now() + interval '1 hour')
        """,
        handlers,
        queues,
        tzdata,
    )


async def request_cancellation(conn: Connection[Record], job_id: int, *, by: str = "someone") -> None:
    """Store a request as rota.cancel() does for a running job."""
    await conn.execute(
        "insert into rota.cancel_requests (job_id, requested_by, reason) values ($1, $2, 'moot')", job_id, by
    )


async def state_of(conn: Connection[Record], job_id: int) -> str | None:
    """Return the job's state as in rota.job_status; None if the job is unknown."""
    states = await conn.fetch("select state from rota.job_status where job_id = $1", job_id)
    assert len(states) <= 1, f"job {job_id} is in {len(states)} places"
    return str(states[0]["state"]) if states else None


async def wait_until_blocked(conn: Connection[Record], *, watched_by: Connection[Record]) -> None:
    """Wait until the connection's statement waits for a lock."""
    pid = conn.get_server_pid()

    async def waits() -> bool:
        return bool(await watched_by.fetchval("select pg_blocking_pids($1) <> '{}'", pid))

    await eventually(waits, what="the lock that this statement has to wait for")


async def _insert_jobs(
    conn: Connection[Record],
    count: int,
    values: Mapping[str, Any],
    instants: Mapping[str, timedelta],
    *,
    step: timedelta,
    token: bool,
) -> list[Record]:
    columns_sql, values_sql, arguments = _columns_and_values(values, instants, step=step)
    issued = "nextval('rota.fence_tokens')" if token else "null"
    return await conn.fetch(
        f"""
        insert into rota.jobs (fence_token, {columns_sql})
        select {issued}, {values_sql}
        from generate_series(0, $1::int - 1) as n
        returning job_id, fence_token
        """,
        count,
        *arguments,
    )


INSTANTS = {
    "run_at",
    "scheduled_for",
    "created_at",
    "start_by",
    "lease_expires_at",
    "started_at",
    "finished_at",
    "seen_at",
}
INTERVALS = {"backoff_base", "backoff_cap", "retry_for", "timeout", "lease"}


def _columns_and_values(
    values: Mapping[str, Any], instants: Mapping[str, timedelta], *, step: timedelta, first: int = 2
) -> tuple[str, str, list[Any]]:
    """Return the column list, the SQL expressions and their arguments. Offsets become instants; NULLs are left out."""
    names, expressions, arguments = [], [], []
    given = {name: value for name, value in {**instants, **values}.items() if value is not None}
    for number, (name, value) in enumerate(given.items(), first):
        names.append(name)
        arguments.append(value)
        if name in INSTANTS:
            expressions.append(f"now() + ${number}::interval")
            if step and name in {"run_at", "finished_at"}:
                expressions[-1] += f" + n * interval '{step // timedelta(microseconds=1)} us'"
        else:
            expressions.append(f"${number}::interval" if name in INTERVALS else f"${number}::{_type_of(name, value)}")
    return ", ".join(names), ", ".join(expressions), arguments


def _type_of(name: str, value: Any) -> str:
    if name in {"payload", "meta", "checkpoint", "result"}:
        return "jsonb"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or name == "schedule_id":
        return "bigint"
    if isinstance(value, float):
        return "real"
    return "uuid" if isinstance(value, UUID) else "text"


@asynccontextmanager
async def without_check_constraints(conn: Connection[Record], *tables: str) -> AsyncIterator[None]:
    """Drop the CHECK constraints of the tables for the block.

    At the end add them again as NOT VALID, as pg_restore does.
    """
    checks = await conn.fetch(
        "select conrelid::regclass::text as relation, conname, pg_get_constraintdef(oid) as definition from pg_constraint "
        "where contype = 'c' and conrelid = any ($1::text[]::regclass[])",
        tables,
    )
    for check in checks:
        await conn.execute(f'alter table {check["relation"]} drop constraint "{check["conname"]}"')
    yield
    for check in checks:
        definition = check["definition"].removesuffix(" NOT VALID")
        await conn.execute(
            f'alter table {check["relation"]} add constraint "{check["conname"]}" {definition} not valid'
        )
