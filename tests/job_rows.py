"""Put jobs into any state directly, and wait for a connection to be held up by another."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

NODE = UUID("00000000-0000-4000-8000-000000000001")


async def scheduled(
    conn: Connection[Record],
    *,
    attempts: int = 0,
    due_in: str = "-5 seconds",
    key: str | None = None,
    handler: str = "h",
) -> int:
    """Insert a job that waits; with attempts, one that waits for its retry."""
    return int(
        await conn.fetchval(
            """
            insert into rota.jobs (handler, run_at, attempt, fence_token, unique_key)
            values ($1, now() + $2::text::interval, $3, case when $3 > 0 then nextval('rota.fence_tokens') end, $4)
            returning job_id
            """,
            handler,
            due_in,
            attempts,
            key,
        )
    )


async def running(conn: Connection[Record], *, key: str | None = None, handler: str = "h") -> tuple[int, int]:
    """Insert a job as if claimed by NODE; return its job_id and its fence token."""
    row = await conn.fetchrow(
        """
        insert into rota.jobs
            (handler, state, attempt, fence_token, leased_by, lease_expires_at, started_at, unique_key, checkpoint)
        values
            ($1, 'running', 1, nextval('rota.fence_tokens'), $2, now() + interval '30 s', now(), $3, '{"done": 3}')
        returning job_id, fence_token
        """,
        handler,
        NODE,
        key,
    )
    assert row is not None
    return row["job_id"], row["fence_token"]


async def dead(
    conn: Connection[Record],
    *,
    key: str | None = None,
    handler: str = "h",
    delivery: str = "at_least_once",
    reason: str = "exhausted",
    schedule_id: int | None = None,
) -> int:
    """Bury a job that had run; return its job_id."""
    job_id, _ = await running(conn, key=key, handler=handler)
    await conn.execute(
        """
        with gone as (delete from rota.jobs where job_id = $1 returning *)
        insert into rota.dead_letters (job_id, run_at, scheduled_for, created_at, fence_token, node, started_at,
            schedule_id, attempt, losses, releases, max_attempts, priority, exclusive, handler, queue, created_by,
            payload, delivery, backoff_base, backoff_cap, retry_for, timeout, lease, unique_key, idempotency_key,
            meta, checkpoint, reason, error_kind, error)
        select job_id, run_at, timestamptz '2026-01-01 00:00:00+00', timestamptz '2025-12-31 00:00:00+00', fence_token,
            leased_by, started_at, $3, 20, 1, 2, 20, priority, $3::bigint is not null, handler, queue, 'somebody',
            '{"n": 1}', $2, '5 s', '1 h', '1 min', '10 s', '30 s', unique_key, 'mine', '{"tenant": 7}', checkpoint,
            $4, 'ValueError', 'it broke'
        from gone
        """,
        job_id,
        delivery,
        schedule_id,
        reason,
    )
    return job_id


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
