"""rota.backfill_schedule: past instants that did not run, each under its own name, and each once."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from rota.db import operations, queries, schedule_queries, schedule_reports
from schedule_rows import make_due, make_schedule, read_clock

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)


async def planned(conn: Connection[Record], name: str = "s", **columns: Any) -> int:
    """A schedule whose next instant lies in the future."""
    made = await make_schedule(conn, name, **columns)
    await make_due(conn, made, ago=-HOUR)
    return made


async def hours(conn: Connection[Record], count: int) -> list[datetime]:
    """The last full hours, the oldest first."""
    last: datetime = await conn.fetchval("select date_trunc('hour', now())")
    return [last - back * HOUR for back in range(count, 0, -1)]


async def backfill(
    conn: Connection[Record], instants: list[datetime], reason: str | None = None
) -> tuple[int, int, int]:
    """(enqueued, left out, undecided)"""
    return await operations.backfill_schedule(conn, name="s", instants=instants, run_at=instants, reason=reason)


async def test_each_instant_becomes_a_job_under_its_own_name_once(conn: Connection[Record]) -> None:
    """Asked for twice, or given twice in one call, it still runs once."""
    made = await planned(conn, payload='{"n": 1}', priority=2, start_within=HOUR)
    instants = await hours(conn, 3)
    assert await backfill(conn, [*instants, instants[0]], "new report") == (3, 0, 0)
    assert await backfill(conn, instants) == (0, 3, 0)
    jobs = await conn.fetch("select * from rota.jobs order by job_id")
    assert [job["scheduled_for"] for job in jobs] == instants
    assert {(job["schedule_id"], job["payload"], job["priority"], job["exclusive"]) for job in jobs} == {
        (made, '{"n": 1}', 2, False)
    }
    assert [job["start_by"] - job["run_at"] for job in jobs] == [HOUR] * 3
    notes = await conn.fetch("select distinct disposition, note from rota.fires")
    assert [tuple(row) for row in notes] == [("enqueued", "backfilled by postgres: new report")]
    assert (
        await conn.fetchval("select affected from rota.audit where action = 'backfill' order by audit_id limit 1") == 3
    )


async def test_what_has_a_row_of_its_own_is_left_out(conn: Connection[Record]) -> None:
    """Whatever it says: that instant has been decided about."""
    made = await planned(conn)
    ran, overlapped, fresh = await hours(conn, 3)
    await conn.execute(
        "insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id) values ($1, $3, 's', 'enqueued', 7),"
        "($2, $3, 's', 'skipped_overlap', null)",
        ran,
        overlapped,
        made,
    )
    assert await backfill(conn, [ran, overlapped, fresh]) == (1, 2, 0)
    assert await conn.fetchval("select scheduled_for from rota.jobs") == fresh


async def test_a_missed_stretch_can_be_made_good_to_its_last_instant(conn: Connection[Record]) -> None:
    """Its row is named after its last instant, which ran as little as the others."""
    made = await planned(conn)
    instants = await hours(conn, 4)
    await conn.execute(
        "insert into rota.fires (scheduled_for, schedule_id, name, disposition, missed_from, missed_count, note)"
        "values ($1, $2, 's', 'skipped_misfire', $3, 4, 'misfire is skip')",
        instants[-1],
        made,
        instants[0],
    )
    assert await backfill(conn, instants) == (4, 0, 0)
    assert await backfill(conn, instants) == (0, 4, 0)
    row = await conn.fetchrow("select * from rota.fires where missed_from is not null")
    assert row is not None
    assert row["disposition"] == "enqueued"
    assert row["note"] == "backfilled by postgres; until then skipped_misfire (misfire is skip)"
    assert await conn.fetchval("select count(distinct job_id) from rota.fires") == 4


async def test_what_is_not_decided_yet_is_the_daemons(conn: Connection[Record]) -> None:
    """Else an instant that a daemon is about to enqueue would run twice."""
    made = await planned(conn)
    instants = await hours(conn, 3)
    await conn.execute(
        "update rota.schedule_clocks set last_fire_at = null, next_fire_at = $1 where schedule_id = $2",
        instants[1],
        made,
    )
    assert await backfill(conn, instants) == (1, 0, 2)
    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity' where schedule_id = $1", made)
    assert (await read_clock(conn, made))["unplanned"]
    ahead = await conn.fetchval("select now() + interval '1 minute'")
    assert await backfill(conn, [*instants, ahead]) == (2, 1, 1)


async def test_two_at_once_enqueue_each_instant_once(database: Database, conn: Connection[Record]) -> None:
    """The clock's lock orders them."""
    await planned(conn)
    instants = await hours(conn, 200)

    async def one() -> tuple[int, int, int]:
        async with database.connect() as own:
            return await backfill(own, instants)

    told = await asyncio.gather(*(one() for _ in range(4)))
    assert sorted(told) == [(0, 200, 0)] * 3 + [(200, 0, 0)]
    assert await conn.fetchval("select count(*) from rota.jobs") == 200


async def test_what_was_backfilled_is_not_forgotten_at_once(conn: Connection[Record]) -> None:
    """Old instants, new decisions: forgotten, they could be backfilled, and run, once more."""
    await planned(conn)
    old = await conn.fetchval("select now() - interval '90 days'")
    await backfill(conn, [old])
    assert await queries.prune(conn, what="fires", keep=timedelta(days=30), limit=100) == 0
    await conn.execute("update rota.fires set decided_at = now() - interval '31 days'")
    assert await queries.prune(conn, what="fires", keep=timedelta(days=30), limit=100) == 1


async def test_one_call_is_one_bounded_transaction(conn: Connection[Record]) -> None:
    """It keeps the schedule's clock locked, and the daemons from deciding."""
    await planned(conn)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.fetch("select * from rota.backfill_schedule('s', array_fill(now(), array[10001]))")
    assert refused.value.sqlstate == "RT006"


async def test_states_are_told_apart(conn: Connection[Record]) -> None:
    """The view says in one word what a person would have to work out of six columns."""
    for name in ("ok", "new", "paused", "invalid", "ended", "overdue", "forgotten"):
        await planned(conn, name)
    await conn.execute(
        """
        update rota.schedule_clocks as clock set
            next_fire_at = case name when 'new' then '-infinity' when 'forgotten' then '-infinity'
                when 'overdue' then now() - interval '1 minute' when 'invalid' then null when 'ended' then null
                else next_fire_at end,
            invalid_reason = case name when 'invalid' then 'why' end
        from rota.schedule_definitions as definition where definition.schedule_id = clock.schedule_id
        """
    )
    await conn.execute(
        "update rota.schedule_definitions set edited_at = now() - interval '1 hour' where name = 'forgotten'"
    )
    await conn.execute("select rota.pause_schedule('paused')")
    found = {row["name"]: row["state"] for row in await conn.fetch("select name, state from rota.schedules")}
    assert found == {
        "ok": "ok", "new": "ok", "paused": "paused", "invalid": "invalid", "ended": "ended", "overdue": "overdue",
        "forgotten": "overdue",
    }  # fmt: skip
    counted = {state: sum(each == state for each in found.values()) for state in found.values()}
    assert await schedule_reports.summarise_schedules(conn) == counted
    assert (await schedule_queries.sample_schedules(conn))[0] == counted


@pytest.mark.parametrize("instant", ["-infinity", "infinity", "1969-12-31 23:59:59+00", "2200-01-01+00"])
async def test_an_instant_outside_the_years_is_refused_by_name(conn: Connection[Record], instant: str) -> None:
    """The index of rota.fires computes with the instant: `cannot subtract infinite dates` names nothing."""
    await planned(conn)
    with pytest.raises(asyncpg.CheckViolationError, match="instants must lie between the years 1970 and 2200"):
        await conn.execute("select rota.backfill_schedule('s', array[$1::text::timestamptz])", instant)
