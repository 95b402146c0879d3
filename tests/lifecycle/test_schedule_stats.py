"""The last success and the consecutive failures of each schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.services import schedule_stats
from rota.services.schedule_stats import ScheduleStats
from schedule_rows import make_schedule, open_transaction, read_clock, recording_telemetry

if TYPE_CHECKING:
    import asyncpg
    import pytest
    from asyncpg import Connection, Record

    from servers import Database


async def test_successes_and_failures_of_schedules_are_counted(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """A success resets the number of consecutive failures."""
    one, other, deleted = [await make_schedule(conn, name) for name in ("one", "other", "gone")]
    await conn.execute("delete from rota.schedules where name = 'gone'")
    stats = ScheduleStats(pool, recording_telemetry())
    for schedule, succeeded in ((one, False), (other, True), (one, False), (other, False), (deleted, True)):
        stats.add(schedule, succeeded=succeeded)
    await stats.run_once()
    first, second = await read_clock(conn, one), await read_clock(conn, other)
    assert (first["last_success_at"], first["consecutive_failures"]) == (None, 2)
    assert (second["last_success_at"] is not None, second["consecutive_failures"]) == (True, 1)

    stats.add(one, succeeded=True)
    await stats.run_once()
    assert (await read_clock(conn, one))["consecutive_failures"] == 0


async def test_statistics_of_a_locked_schedule_are_written_later(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    schedule_id = await make_schedule(conn)
    stats = ScheduleStats(pool, recording_telemetry())
    stats.add(schedule_id, succeeded=False)
    async with open_transaction(database, "update rota.schedules set paused = true"):
        await stats.run_once()
    assert (await read_clock(conn, schedule_id))["consecutive_failures"] == 0
    await stats.run_once()
    assert (await read_clock(conn, schedule_id))["consecutive_failures"] == 1


async def test_a_stopping_node_writes_the_statistics_of_all_unlocked_schedules(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither pauses between batches nor waits for a lock."""
    monkeypatch.setattr(schedule_stats, "BATCH", 1)
    schedule_ids = [await make_schedule(conn, name) for name in ("one", "other", "edited")]
    stats = ScheduleStats(pool, recording_telemetry())
    for schedule in schedule_ids:
        stats.add(schedule, succeeded=False)
    async with open_transaction(database, "update rota.schedules set paused = true where name = 'edited'"):
        await stats.finish()
    assert [(await read_clock(conn, each))["consecutive_failures"] for each in schedule_ids] == [1, 1, 0]
