"""Put rows into any state directly, back-dated at will, and say where a job stands.

Instants are given as offsets from the database's now(): `run_at=timedelta(seconds=-5)` was due five seconds ago.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from asyncpg import Connection, Record

NODE = UUID("00000000-0000-4000-8000-000000000001")
OTHER_NODE = UUID("00000000-0000-4000-8000-000000000002")

A_WHILE_AGO = timedelta(seconds=-5)
HALF_A_MINUTE = timedelta(seconds=30)
AT_ONCE = timedelta(0)


class Made(NamedTuple):
    """What identifies a job, and the claim that was made up for it."""

    job_id: int
    fence_token: int | None


class Claimed(NamedTuple):
    """The same of a running job, which always has a token."""

    job_id: int
    fence_token: int


async def make_job(
    conn: Connection[Record],
    *,
    state: Literal["scheduled", "running"] = "scheduled",
    handler: str = "h",
    run_at: timedelta = A_WHILE_AGO,
    attempt: int = 0,
    **columns: Any,
) -> Made:
    """Insert a job; with attempts, one that has been claimed before and waits for its retry.

    `columns` are those of rota.jobs. What a claim writes is filled in for a running job: see `make_running_job`.
    """
    if state == "running":
        return Made(*await make_running_job(conn, handler=handler, run_at=run_at, attempt=attempt or 1, **columns))
    (made,) = await make_jobs(conn, 1, handler=handler, run_at=run_at, attempt=attempt, **columns)
    return made


async def make_running_job(
    conn: Connection[Record],
    *,
    handler: str = "h",
    run_at: timedelta = A_WHILE_AGO,
    lease: timedelta = HALF_A_MINUTE,
    node: UUID = NODE,
    attempt: int = 1,
    **columns: Any,
) -> Claimed:
    """Insert a job as if `node` had claimed it. `lease` is what is left of it: negative, it has expired."""
    (made,) = await make_running_jobs(
        conn, 1, handler=handler, run_at=run_at, lease=lease, node=node, attempt=attempt, **columns
    )
    return made


async def make_jobs(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    run_at: timedelta = A_WHILE_AGO,
    step: timedelta = AT_ONCE,
    attempt: int = 0,
    **columns: Any,
) -> list[Made]:
    """Insert many jobs alike, each due `step` later than the one before."""
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
    return [Made(row["job_id"], row["fence_token"]) for row in rows]


async def make_running_jobs(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    run_at: timedelta = A_WHILE_AGO,
    lease: timedelta = HALF_A_MINUTE,
    node: UUID = NODE,
    attempt: int = 1,
    **columns: Any,
) -> list[Claimed]:
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
    instants = {"run_at": run_at, "lease_expires_at": lease, "started_at": lease - HALF_A_MINUTE}
    rows = await _insert_jobs(conn, count, values, instants, step=AT_ONCE, token=True)
    return [Claimed(row["job_id"], row["fence_token"]) for row in rows]


async def make_dead_letter(
    conn: Connection[Record],
    *,
    handler: str = "h",
    reason: str = "exhausted",
    delivery: str = "at_least_once",
    finished_at: timedelta = AT_ONCE,
    **columns: Any,
) -> int:
    """Bury a job that had run, and which carries every column that a redrive has to keep; return its job_id."""
    (job_id,) = await make_dead_letters(
        conn, 1, handler=handler, reason=reason, delivery=delivery, finished_at=finished_at, **columns
    )
    return job_id


async def make_dead_letters(
    conn: Connection[Record],
    count: int,
    *,
    handler: str = "h",
    finished_at: timedelta = AT_ONCE,
    step: timedelta = AT_ONCE,
    **columns: Any,
) -> list[int]:
    """Bury many jobs alike, each `step` later than the one before; return their job_ids."""
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
        "started_at": finished_at - HALF_A_MINUTE,
        "finished_at": finished_at,
    }
    columns_sql, values_sql, arguments = _spelled(values, instants, step=step)
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
    finished_at: timedelta = AT_ONCE,
    handler: str = "h",
    **columns: Any,
) -> Claimed:
    """Write the ledger's row of a job that has ended."""
    (made,) = await make_ledger_rows(conn, 1, outcome=outcome, finished_at=finished_at, handler=handler, **columns)
    return made


async def make_ledger_rows(
    conn: Connection[Record],
    count: int,
    *,
    outcome: str = "succeeded",
    finished_at: timedelta = AT_ONCE,
    handler: str = "h",
    **columns: Any,
) -> list[Claimed]:
    """Write many of them alike."""
    values = {"handler": handler, "queue": "default", "outcome": outcome, "attempts": 1, "node": NODE, **columns}
    instants = {"scheduled_for": finished_at - HALF_A_MINUTE, "started_at": finished_at, "finished_at": finished_at}
    columns_sql, values_sql, arguments = _spelled(values, instants, step=AT_ONCE)
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
    return [Claimed(row["job_id"], row["fence_token"]) for row in rows]


async def make_attempts(
    conn: Connection[Record], count: int, *, job_id: int = 1, finished_at: timedelta = AT_ONCE, outcome: str = "failed"
) -> None:
    """Write down attempts of one job that did not succeed."""
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
    """Register a handler, as a daemon does at its start: without it, its jobs are nobody's to claim."""
    values = {"handler": handler, **columns}
    columns_sql, values_sql, arguments = _spelled(values, {"seen_at": AT_ONCE}, step=AT_ONCE, first=1)
    await conn.execute(
        f"insert into rota.handlers ({columns_sql}) select {values_sql} on conflict do nothing",
        *arguments,
    )


async def ask_to_cancel(conn: Connection[Record], job_id: int, *, by: str = "someone") -> None:
    """Leave a request as rota.cancel() does for a job that runs."""
    await conn.execute(
        "insert into rota.cancel_requests (job_id, requested_by, reason) values ($1, $2, 'moot')", job_id, by
    )


async def state_of(conn: Connection[Record], job_id: int) -> str | None:
    """Say where a job stands, as people see it."""
    states = await conn.fetch("select state from rota.job_status where job_id = $1", job_id)
    assert len(states) <= 1, f"job {job_id} is in {len(states)} places"
    return str(states[0]["state"]) if states else None


async def held_up(conn: Connection[Record], *, watched_by: Connection[Record]) -> None:
    """Return once that connection waits for a lock."""
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
    columns_sql, values_sql, arguments = _spelled(values, instants, step=step)
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


def _spelled(
    values: Mapping[str, Any], instants: Mapping[str, timedelta], *, step: timedelta, first: int = 2
) -> tuple[str, str, list[Any]]:
    """Columns, and what to insert into them: NULLs and numbers are the driver's affair, offsets become instants."""
    names, spellings, arguments = [], [], []
    given = {name: value for name, value in {**instants, **values}.items() if value is not None}
    for number, (name, value) in enumerate(given.items(), first):
        names.append(name)
        arguments.append(value)
        if name in INSTANTS:
            spellings.append(f"now() + ${number}::interval")
            if step and name in {"run_at", "finished_at"}:
                spellings[-1] += f" + n * interval '{step // timedelta(microseconds=1)} us'"
        else:
            spellings.append(f"${number}::interval" if name in INTERVALS else f"${number}::{_type_of(name, value)}")
    return ", ".join(names), ", ".join(spellings), arguments


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
async def no_checks(conn: Connection[Record], *tables: str) -> AsyncIterator[None]:
    """Drop the CHECK constraints of tables, and add them again at the end as they are after pg_restore: not validated."""
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
