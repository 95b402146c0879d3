"""Values that can't be computed with are refused at INSERT, in every column and as every argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest

from daemon_queries import claim

if TYPE_CHECKING:
    from asyncpg import Connection, Record


HOSTILE_INTERVALS = (
    "106751000 days -2562023976 hours",  # 24 hours by value
    "-1 days 25 hours",
    "2 days -1 microseconds",
    "1 month -29 days",
    "-1 months 32 days",
    "1 year -364 days",
    "-1 hours",
    "0",
    "367 days",
    "178956970 years",
    "2147483647 days",
    "-2147483648 days",
)

ZEROS = ("24 hours -1 days", "1 month -30 days", "106751000 days -2562024000 hours")
"""Intervals of value 0 whose parts are not."""

HOSTILE_INSTANTS = (
    "infinity",
    "-infinity",
    "4713-01-01 00:00:00+00 BC",
    "0001-01-01 00:00:00+00",
    "2200-01-01 00:00:00+00",
    "9999-12-31 23:59:59+00",
    "294276-12-31 23:59:59+00",
)

NOT_DERIVED = """
select table_name || '.' || column_name
from information_schema.columns
where table_schema = 'rota' and table_name in ('jobs', 'schedules', 'handlers') and data_type = $1
order by 1
"""

OWNERS_INSTANTS = {
    "jobs.created_at", "jobs.lease_expires_at", "jobs.started_at", "handlers.seen_at", "handlers.paused_at",
    "schedules.created_at", "schedules.edited_at", "schedules.paused_at", "schedules.next_fire_at", "schedules.last_fire_at",
    "schedules.last_success_at",
}  # fmt: skip
"""Instants that only daemons, triggers and the owner write."""


def _insert(column: str) -> str:
    table, name = column.split(".")
    if table == "jobs":
        return f"insert into rota.jobs (handler, {name}) values ('h', $1::text::interval)"
    if table == "handlers":
        return f"insert into rota.handlers (handler, {name}) values (gen_random_uuid()::text, $1::text::interval)"
    every = "" if name == "every" else "every, "
    value = "" if name == "every" else "'1 min', "
    return (
        f"insert into rota.schedules (name, handler, {every}{name}) "
        f"values (gen_random_uuid()::text, 'h', {value}$1::text::interval)"
    )


async def test_every_interval_column_takes_only_intervals_of_one_sign_within_366_days(conn: Connection[Record]) -> None:
    """PostgreSQL compares intervals by value and adds them part by part, so a value within the bounds may overflow."""
    columns = [row[0] for row in await conn.fetch(NOT_DERIVED, "interval")]
    assert {"jobs.lease", "jobs.retry_for", "schedules.jitter", "schedules.expect_success_within"} <= set(columns)
    for column in columns:
        for value in (*HOSTILE_INTERVALS, *ZEROS):
            if (column, value) == ("schedules.jitter", "0"):
                continue
            # PostgreSQL 14 can't read the largest hours.
            with pytest.raises((asyncpg.CheckViolationError, asyncpg.IntervalFieldOverflowError)) as refused:
                await conn.execute(_insert(column), value)
            if isinstance(refused.value, asyncpg.CheckViolationError):
                assert column.split(".")[1] in str(refused.value), (column, value)
        for value in (
            "30 seconds",
            "90 minutes",
            "23:59:59.999999",
            *(() if "lease" in column else ("366 days", "8784 h")),
        ):
            await conn.execute(_insert(column), value)


async def test_every_public_instant_lies_between_1970_and_2200(conn: Connection[Record]) -> None:
    """Every instant derived from one can be represented by PostgreSQL and by Python."""
    columns = [row[0] for row in await conn.fetch(NOT_DERIVED, "timestamp with time zone")]
    for column in sorted(set(columns) - OWNERS_INSTANTS):
        for value in HOSTILE_INSTANTS:
            statement = _insert(column).replace("::interval", "::timestamptz")
            if column == "schedules.resume_at":
                statement = statement.replace("every, ", "paused, every, ").replace("'1 min', ", "true, '1 min', ")
            with pytest.raises(asyncpg.CheckViolationError) as refused:
                await conn.execute(statement, value)
            assert column.split(".")[1] in str(refused.value), (column, value)


@pytest.mark.parametrize(
    "call",
    [
        "rota.enqueue('h', retry_for => '106751000 days -2562023976 hours')",
        "rota.enqueue('h', lease => '106751000 days -2562023976 hours')",
        "rota.enqueue('h', run_at => 'infinity')",
        "rota.put_schedule('s', handler => 'h', every => '106751000 days -2562023976 hours')",
        "rota.put_schedule('s', handler => 'h', every => '1 h', jitter => '106751000 days -2562024000 hours')",
        "rota.redrive_many(handler => 'h', spread => '106751000 days -2562023976 hours')",
        "rota.reschedule((select job_id from rota.jobs limit 1), run_at => 'infinity')",
        "rota.reschedule((select job_id from rota.jobs limit 1), run_at => '20000-01-01')",
        "rota.pause_schedule('paused', resume_at => '20000-01-01')",
        "rota.backfill_schedule('paused', array['-infinity'::timestamptz])",
    ],
)
async def test_functions_refuse_the_same_values(conn: Connection[Record], call: str) -> None:
    """Each function ends in the same constraints, or has its own check."""
    await conn.execute("insert into rota.jobs (handler) values ('h')")
    await conn.execute("select rota.put_schedule('paused', handler => 'h', every => '1 h')")
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.PostgresError)) as refused:
        await conn.execute(f"select {call}")
    assert refused.value.sqlstate in {"23514", "22008", "22015", "RT006"}, refused.value


@pytest.mark.parametrize("losses", [-1, 4])
async def test_the_owner_cannot_store_losses_that_no_claim_searches(conn: Connection[Record], losses: int) -> None:
    """Such a job would be neither claimed nor reported."""
    with pytest.raises(asyncpg.CheckViolationError, match="losses must lie between 0 and 3"):
        await conn.execute("insert into rota.jobs (handler, losses) values ('h', $1)", losses)


async def test_one_bad_dead_letter_keeps_no_other_from_being_redriven(conn: Connection[Record]) -> None:
    """Dead letters have no constraints on intervals: they hold whatever the job's row held."""
    await conn.execute(
        """
        insert into rota.dead_letters (job_id, run_at, scheduled_for, created_at, attempt, losses, releases, priority,
            exclusive, handler, queue, created_by, payload, lease, backoff_cap, reason)
        select n, now(), now(), now(), 1, 0, 0, 5, false, 'h', 'default', 'me', '{}',
            case when n = 2 then interval '106751000 days' - 2562023976 * interval '1 hour' end,
            case when n = 2 then interval '-2 days' end, 'permanent'
        from generate_series(1, 3) as n
        """
    )
    assert tuple(
        await conn.fetchrow("select redriven, left_out from rota.redrive_many(handler => 'h', spread => '1 h')") or ()
    ) == (2, 1)
    assert await conn.fetchval("select max(run_at) > now() + interval '1 minute' from rota.jobs")
    assert await conn.fetchval("select array_agg(job_id) from rota.dead_letters") == [2]
    # PostgreSQL 14 fails while it writes the interval into the error's detail.
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.DatetimeFieldOverflowError), match=r"must|out of range"):
        await conn.execute("select rota.redrive(2)")


TOO_LARGE = "to_jsonb(repeat('x', 1048577))"


@pytest.mark.parametrize(("column", "is_checked"), [("priority", True), ("fence_token", False), ("schedule_id", False)])
async def test_a_payload_is_checked_once(conn: Connection[Record], column: str, is_checked: bool) -> None:
    """Clients can set neither fence_token nor schedule_id. Checking large payloads again would delay a batch by seconds."""
    insert = f"insert into rota.jobs (handler, payload, {column}) values ('h', {TOO_LARGE}, 1)"
    if is_checked:
        with pytest.raises(asyncpg.CheckViolationError, match="1 MiB"):
            await conn.execute(insert)
    else:
        await conn.execute(insert)


async def test_a_claim_returns_no_payload_that_is_large_after_decompression(conn: Connection[Record]) -> None:
    """It is stored in 12 KiB. Writing the text of a batch of these would take seconds."""
    await conn.execute("insert into rota.handlers (handler) values ('h')")
    await conn.execute("insert into rota.jobs (handler, payload) values ('h', to_jsonb(repeat('x', 1000000)))")
    (claimed,) = await claim(conn)
    assert claimed.payload is None
    assert await conn.fetchval("select pg_column_size(payload) from rota.jobs") < 32768
