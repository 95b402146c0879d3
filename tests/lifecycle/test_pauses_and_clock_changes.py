"""Pauses, ends, manual runs, and instants in gaps and folds of the local clock."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from schedule_rows import (
    Planner,
    make_due,
    make_schedule,
    open_transaction,
    read_clock,
    read_dispositions,
    read_fires,
    utc,
)

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


async def test_a_schedule_resumes_at_resume_at_and_records_the_pause_in_one_row(
    conn: Connection[Record], planner: Planner
) -> None:
    schedule_id = await make_schedule(conn, cron=None, every=timedelta(minutes=10))
    await conn.execute("select rota.pause_schedule('s', resume_at => now() + interval '1 day')")
    await planner.turn()
    assert await read_fires(conn) == []

    await conn.execute(
        """
        update rota.schedule_definitions set created_at = now() - interval '3 h', paused_at = now() - interval '2 h',
            edited_at = now() - interval '2 h', resume_at = now() - interval '1 s'
        """
    )
    await planner.turn()
    assert not await conn.fetchval("select paused from rota.schedules")
    assert len(planner.events_named("schedules.resumed")) == 1

    await planner.turn()
    row = await conn.fetchrow("select * from rota.fires")
    assert row is not None
    assert row["disposition"] == "skipped_paused"
    assert row["missed_count"] in {11, 12}
    assert (await read_clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_schedule_with_a_locked_clock_is_resumed_later_and_delays_no_other(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """An open backfill or redrive locks the clock, and resuming is an edit that would wait for it."""
    schedule_id = await make_schedule(conn)
    other = await make_schedule(conn, "other")
    await make_due(conn, other)
    await conn.execute("select rota.pause_schedule('s', resume_at => now() - interval '1 s')")

    async with open_transaction(database, "select rota.backfill_schedule('s', array[now() - interval '1 day'])"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await read_dispositions(conn, other), planner.events_named("schedules.resumed")) == (["enqueued"], [])
        assert (
            not planner.scheduler._wake._flag.is_set()
        )  # otherwise the scheduler would run again without a pause while the lock lasts
    await planner.turn()

    assert not await conn.fetchval("select paused from rota.schedules where schedule_id = $1", schedule_id)


async def test_instants_missed_during_a_pause_do_not_run_after_it(conn: Connection[Record], planner: Planner) -> None:
    """This holds for a manual resume, and with misfire = 'all'."""
    schedule_id = await make_schedule(
        conn, cron=None, every=timedelta(minutes=10), misfire="all", on_time_within=3 * HOUR
    )
    await conn.execute("select rota.pause_schedule('s')")
    await conn.execute(
        """
        update rota.schedule_definitions set created_at = now() - interval '3 h', paused_at = now() - interval '2 h',
            edited_at = now() - interval '2 h'
        """
    )
    await conn.execute("select rota.resume_schedule('s')")
    await planner.turn()

    assert await read_dispositions(conn) == ["skipped_paused"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0
    assert (await read_clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_schedule_does_not_fire_at_or_after_its_end(conn: Connection[Record], planner: Planner) -> None:
    due = await conn.fetchval("select date_trunc('second', now()) - interval '2 s'")
    schedule_id = await make_schedule(conn, cron=None, every=SECOND, start_at=due - HOUR, end_at=due + SECOND)
    await conn.execute("update rota.schedule_clocks set next_fire_at = $1", due)
    await planner.turn()
    await planner.turn()
    assert await read_fires(conn) == [("enqueued", due)]
    assert (await read_clock(conn, schedule_id))["next_fire_at"] is None
    assert await conn.fetchval("select state from rota.schedules") == "ended"


async def test_a_manual_run_does_not_overlap_the_next_fire(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, overlap="skip")
    await conn.execute("select rota.run_schedule_now('s')")
    await conn.execute("update rota.fires set scheduled_for = scheduled_for - interval '1 h'")
    await make_due(conn, schedule_id)
    await planner.turn()
    assert await read_dispositions(conn) == ["run_now", "enqueued"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 2


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, [("enqueued", utc(2026, 3, 29, 1)), ("enqueued", utc(2026, 3, 30, 0, 30))]),
        ({"dst_gap": "skip"}, [("skipped_gap", utc(2026, 3, 29, 1)), ("enqueued", utc(2026, 3, 30, 0, 30))]),
    ],
)
async def test_an_instant_in_a_clock_gap_fires_at_the_change_or_is_skipped(
    conn: Connection[Record], planner: Planner, columns: dict[str, Any], expected: list[tuple[str, datetime]]
) -> None:
    """Half past two does not exist in Vienna on 29 March 2026."""
    await make_schedule(
        conn, cron="30 2 * * *", timezone="Europe/Vienna", misfire="all", overlap="allow",
        end_at=utc(2026, 3, 30, 12), **columns,
    )  # fmt: skip
    await conn.execute(
        "update rota.schedule_definitions set created_at = '2026-01-01', edited_at = '2026-03-28 12:00+00'"
    )
    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
    await planner.turn()

    assert await read_fires(conn) == expected


@pytest.mark.parametrize(
    ("dst_fold", "instants"),
    [("first", [utc(2025, 10, 26, 0, 30)]), ("both", [utc(2025, 10, 26, n, 30) for n in (0, 1)])],
)
async def test_an_instant_in_a_clock_fold_fires_once_or_twice(
    conn: Connection[Record], planner: Planner, dst_fold: str, instants: list[datetime]
) -> None:
    """Half past two happens twice in Vienna on 26 October 2025."""
    await make_schedule(
        conn, cron="30 2 * * *", timezone="Europe/Vienna", misfire="all", overlap="allow",
        end_at=utc(2025, 10, 26, 12), dst_fold=dst_fold,
    )  # fmt: skip
    await conn.execute(
        "update rota.schedule_definitions set created_at = '2025-01-01', edited_at = '2025-10-25 12:00+00'"
    )
    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
    await planner.turn()

    assert await read_fires(conn) == [("enqueued", each) for each in instants]
    assert await conn.fetchval("select count(distinct scheduled_for) from rota.jobs") == len(instants)
