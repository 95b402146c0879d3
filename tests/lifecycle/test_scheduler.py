"""The scheduler turns due schedules into fires and jobs, once per schedule and instant, whichever node decides."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import make_dead_letter
from rota.db import schedule_queries
from rota.domain.shards import EVERY_SHARD
from rota.lifecycle import scheduler as scheduler_module
from rota.runtime.clock import boottime
from schedule_rows import (
    Planner,
    end_live_jobs,
    make_due,
    make_schedule,
    open_transaction,
    read_clock,
    read_dispositions,
    read_fires,
)

if TYPE_CHECKING:
    import asyncpg
    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


async def test_b31_a_new_schedule_is_planned_and_does_not_fire(conn: Connection[Record], planner: Planner) -> None:
    """The next fire is strictly later than the edit."""
    schedule_id = await make_schedule(conn, cron="* * * * *")
    await planner.turn()
    assert await read_fires(conn) == []
    assert (await read_clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_due_instant_becomes_a_fire_and_a_job_with_the_schedules_settings(
    conn: Connection[Record], planner: Planner
) -> None:
    schedule_id = await make_schedule(
        conn, payload='{"n": 1}', priority=2, max_attempts=3, timeout=SECOND, meta='{"tenant": 7}', start_within=HOUR
    )
    due = await make_due(conn, schedule_id)
    await planner.turn()
    job = await conn.fetchrow("select *, start_by - greatest(run_at, created_at) as to_begin from rota.jobs")

    assert job is not None
    assert (job["schedule_id"], job["scheduled_for"], job["run_at"], job["exclusive"]) == (schedule_id, due, due, True)
    assert (job["payload"], job["priority"], job["max_attempts"], job["queue"]) == ('{"n": 1}', 2, 3, "default")
    assert (job["timeout"], job["meta"], job["to_begin"]) == (SECOND, '{"tenant": 7}', HOUR)
    assert await conn.fetchval("select job_id from rota.fires") == job["job_id"]
    assert (await read_clock(conn, schedule_id))["last_fire_at"] == due


async def test_a_schedules_jobs_take_the_queue_of_their_handler(conn: Connection[Record], planner: Planner) -> None:
    await conn.execute("insert into rota.handlers (handler, queue) values ('h', 'mail')")
    await make_due(conn, await make_schedule(conn))
    await planner.turn()
    assert await conn.fetchval("select queue from rota.jobs") == "mail"


async def test_jitter_delays_run_at_and_leaves_scheduled_for_unchanged(
    conn: Connection[Record], planner: Planner
) -> None:
    schedule_id = await make_schedule(conn, jitter=HOUR)
    due = await make_due(conn, schedule_id)
    await planner.turn()
    row = await conn.fetchrow("select scheduled_for, run_at - scheduled_for as later from rota.jobs")
    assert row is not None
    assert row["scheduled_for"] == due
    assert row["later"] == await conn.fetchval("select rota.jitter_offset($1, '1 hour')", schedule_id)


async def test_b39_eight_planners_without_shards_make_one_fire_per_instant(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """The planners that decide too late write nothing and see no error."""
    names = [f"s{n}" for n in range(300)]
    for name in names:
        await make_schedule(conn, name, overlap="allow" if name.endswith("7") else "skip")
    planners = [Planner(pool) for _ in range(8)]
    for _ in range(3):
        await conn.execute(
            "update rota.schedule_clocks set last_fire_at = null, next_fire_at = now() - schedule_id * interval '1 ms'"
        )
        await asyncio.gather(*(planner.turn() for planner in planners for _ in range(2)))
        await end_live_jobs(conn)
    assert await conn.fetchval("select count(*) from rota.fires where disposition = 'enqueued'") == 3 * len(names)
    assert await conn.fetchval("select count(distinct job_id) from rota.fires") == 3 * len(names)
    assert await conn.fetchval("select count(*) from rota.schedule_clocks where next_fire_at <= now()") == 0

    decided = sum(events["decided"] for planner in planners for events in planner.events_named("fires.recorded"))
    assert decided == 3 * len(names)


async def test_a_decision_based_on_an_older_version_writes_nothing(conn: Connection[Record]) -> None:
    schedule_id = await make_schedule(conn)
    due = await make_due(conn, schedule_id)
    await conn.execute("update rota.schedules set cron = '1 1 * * *'")
    fires = [(due, "enqueue", None, None, None)]
    decided, events = await schedule_queries.record_fires(
        conn, [schedule_queries.Decision([(schedule_id, 1)], due, due + HOUR, due, fires)]
    )

    assert (decided, events) == (0, [])
    assert await read_dispositions(conn) == ["skipped_edit"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_a_decision_sent_twice_makes_one_job(conn: Connection[Record]) -> None:
    """A node sends it again when the reply was lost."""
    schedule_id = await make_schedule(conn)
    due = await make_due(conn, schedule_id)
    again = [schedule_queries.Decision([(schedule_id, 1)], due, due + HOUR, due, [(due, "enqueue", None, None, None)])]
    assert [(await schedule_queries.record_fires(conn, again))[0] for _ in range(2)] == [1, 0]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_a_schedule_locked_by_its_editor_delays_no_other_schedule(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    locked = await make_schedule(conn, "locked")
    other = await make_schedule(conn, "other")
    for each in (locked, other):
        await make_due(conn, each)

    async with open_transaction(database, "update rota.schedules set cron = '1 1 * * *' where name = 'locked'"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await read_dispositions(conn, locked), await read_dispositions(conn, other)) == ([], ["enqueued"])
    await planner.turn()

    assert await read_dispositions(conn, locked) == ["enqueued"]


async def test_a_locked_job_delays_no_other_schedule(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """The job of an open transaction counts as live, so the next fire is skipped for overlap."""
    schedule_id = await make_schedule(conn)
    other = await make_schedule(conn, "other")
    await make_due(conn, schedule_id)
    await planner.turn()
    for each in (schedule_id, other):
        await make_due(conn, each)

    async with open_transaction(database, "delete from rota.jobs"):
        await asyncio.wait_for(planner.turn(), 5)

    assert await read_dispositions(conn, schedule_id) == ["enqueued", "skipped_overlap"]
    assert await read_dispositions(conn, other) == ["enqueued"]


@pytest.mark.parametrize("is_waiting", [False, True], ids=["a fire that is due", "a fire that waits"])
async def test_a_redrive_in_an_open_transaction_delays_only_its_own_schedule(
    database: Database, conn: Connection[Record], planner: Planner, *, is_waiting: bool
) -> None:
    """Until that transaction ends, it is unknown whether the redriven job is live."""
    schedule_id = await make_schedule(conn, overlap="queue_one")
    other = await make_schedule(conn, "other")
    if is_waiting:
        for ago in (30, 20):
            await make_due(conn, schedule_id, ago=ago * SECOND)
            await planner.turn()
        await end_live_jobs(conn)
    else:
        await make_due(conn, schedule_id)
    before = await read_fires(conn, schedule_id)
    letter = await make_dead_letter(conn, schedule_id=schedule_id)
    await make_due(conn, other)

    async with open_transaction(database, f"select rota.redrive({letter})"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await read_fires(conn, schedule_id), await read_dispositions(conn, other)) == (before, ["enqueued"])
    await planner.turn()

    assert await read_dispositions(conn, schedule_id) == ["enqueued"] * (2 if is_waiting else 1)


async def test_b35_an_unknown_timezone_stops_only_its_own_schedule(conn: Connection[Record], planner: Planner) -> None:
    """The schedule gets an invalid_reason and an error in the log; it never falls back to UTC."""
    wrong = await make_schedule(conn, "wrong", timezone="Europe/Berlln")
    right = await make_schedule(conn, "right", timezone="Europe/Berlin")
    await planner.turn()
    assert "Europe/Berlin" in (await read_clock(conn, wrong))["invalid_reason"]
    assert (await read_clock(conn, right))["next_fire_at"] is not None
    assert [event["schedule"] for event in planner.events_named("schedule.invalid")] == ["wrong"]

    await conn.execute("update rota.schedules set timezone = 'Europe/Berlin' where name = 'wrong'")
    await planner.turn()
    assert (await read_clock(conn, wrong))["next_fire_at"] is not None


async def test_a_new_node_plans_invalid_schedules_again(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """The new node may have newer zone data."""
    schedule_id = await make_schedule(conn, timezone="Europe/Berlln")
    await planner.turn()
    await conn.execute("update rota.schedule_definitions set timezone = 'Europe/Berlin'")
    await conn.execute("update rota.schedule_clocks set next_fire_at = null, invalid_reason = 'old data'")
    await planner.turn()
    assert (await read_clock(conn, schedule_id))["next_fire_at"] is None
    await Planner(pool).turn()
    assert (await read_clock(conn, schedule_id))["next_fire_at"] is not None


async def test_next_fires_planned_with_other_zone_data_are_planned_again(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """Governments change clock rules, and a fire planned years ahead would be at the wrong hour."""
    yearly = await make_schedule(conn, "yearly", cron="0 9 1 6 *", timezone="Asia/Almaty")
    others = [
        await make_schedule(conn, "due", cron="0 9 1 6 *"),
        await make_schedule(conn, "paused", cron="0 9 1 6 *", paused=True),
        await make_schedule(conn, "beat", every=timedelta(days=300)),
        await make_schedule(conn, "right", cron="0 9 1 6 *"),
    ]
    await planner.turn()
    await make_due(conn, others[0])
    right = [(await read_clock(conn, schedule_id))["next_fire_at"] for schedule_id in (yearly, *others[1:])]
    assert right[0].hour == 4

    await conn.execute(
        "update rota.schedule_clocks set next_fire_at = next_fire_at - interval '1 hour' where schedule_id = $1", yearly
    )
    assert await conn.fetchval("select planned_with from rota.meta") is not None

    again = Planner(pool)
    await again.turn()
    assert (await read_clock(conn, yearly))["next_fire_at"] == right[0] - timedelta(hours=1), "found by ourselves"

    await conn.execute("update rota.meta set planned_with = 'rota 0.1, tzdata 2023c'")
    again = Planner(pool)
    await again.turn()
    assert [(await read_clock(conn, schedule_id))["next_fire_at"] for schedule_id in (yearly, *others[1:])] == right
    assert await read_dispositions(conn) == ["enqueued"], (
        "what is due is decided about; nothing fires because of new data"
    )
    assert [event["count"] for event in again.events_named("schedules.moved")] == [1]
    assert "2023c" not in await conn.fetchval("select planned_with from rota.meta")


async def test_next_fires_are_planned_again_until_all_nodes_have_the_same_zone_data(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """During an upgrade, nodes with older data may still plan fires."""
    await conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, tzdata, state) "
        "values (gen_random_uuid(), 'old', 1, '0.1', 'x', '{}', '{}', '{}', '2023c', 'running')"
    )
    await Planner(pool).turn()
    assert await conn.fetchval("select planned_with from rota.meta") is None

    await conn.execute("delete from rota.nodes")
    await Planner(pool).turn()
    assert await conn.fetchval("select planned_with from rota.meta") is not None


async def test_a_schedule_whose_job_is_rejected_blocks_no_other_schedule(
    conn: Connection[Record], planner: Planner
) -> None:
    bad = await make_schedule(conn, "bad", jitter=timedelta(days=366))
    good = await make_schedule(conn, "good")
    await conn.execute(
        "alter table rota.jobs add constraint \"no later than tomorrow\" check (run_at < now() + '1 day')"
    )
    for each in (bad, good):
        await make_due(conn, each)
    await planner.turn()

    assert (await read_dispositions(conn, bad), await read_dispositions(conn, good)) == ([], ["enqueued"])
    assert "no later than tomorrow" in (await read_clock(conn, bad))["invalid_reason"]


async def test_a_node_serves_its_own_shards_and_after_two_seconds_those_of_others(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """This covers the shards of a dead node."""
    schedule_id = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != schedule_id % 256])
    await make_due(conn, schedule_id, ago=SECOND)
    await elsewhere.turn()
    assert await read_fires(conn) == []
    await make_due(conn, schedule_id, ago=3 * SECOND)
    await elsewhere.turn()
    assert await read_dispositions(conn) == ["enqueued"]


async def test_a_node_that_is_leaving_decides_about_no_schedule(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    await make_due(conn, await make_schedule(conn), ago=HOUR)
    await Planner(pool, shards=None).turn()
    assert await read_fires(conn) == []


async def test_a_node_without_shards_decides_what_is_two_seconds_late(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """With hundreds of nodes, the only survivor may have no shard."""
    await make_due(conn, await make_schedule(conn), ago=3 * SECOND)
    await Planner(pool, shards=()).turn()
    assert await read_dispositions(conn) == ["enqueued"]


async def test_a_change_of_nodes_makes_a_node_search_all_shards_once(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    schedule_id = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != schedule_id % 256])
    await make_due(conn, schedule_id)
    elsewhere.scheduler.nodes_changed()
    await elsewhere.turn()
    assert await read_dispositions(conn) == ["enqueued"]


async def test_a_machine_that_slept_during_a_sweep_searches_everything_soon_afterwards(
    conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep pauses for ten times its duration. After a night's sleep, that pause would last days."""
    real, slept = schedule_queries.take_due_schedules, [0.0]

    async def sleep_meanwhile(*args: Any, **kwargs: Any) -> schedule_queries.DueSchedulesResult:
        found = await real(*args, **kwargs)
        slept[0] += 8 * 3600
        return found

    monkeypatch.setattr(scheduler_module, "boottime", lambda: boottime() + slept[0])
    planner = Planner(pool)

    with monkeypatch.context() as night:
        night.setattr(schedule_queries, "take_due_schedules", sleep_meanwhile)
        await planner.turn()
    schedule_id = await make_schedule(conn)
    await make_due(conn, schedule_id, ago=8 * HOUR)
    slept[0] += scheduler_module.MAX_SWEEP_SECONDS
    await planner.scheduler.turn()

    assert await read_dispositions(conn) == ["enqueued"]


async def test_the_scheduler_sleeps_until_the_next_instant_at_most_a_second(
    conn: Connection[Record], planner: Planner
) -> None:
    schedule_id = await make_schedule(conn)
    await planner.turn()
    await make_due(conn, schedule_id, ago=timedelta(milliseconds=-300))
    assert 0.1 < await planner.turn() <= 0.3
    await end_live_jobs(conn)
    await conn.execute("update rota.schedules set cron = null, every = '1 hour'")
    await make_due(conn, schedule_id, ago=-HOUR)
    assert await planner.turn() == 1.0
