"""Missed instants, and fires whose schedule still has a live job."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from rota.db import queries, schedule_queries
from schedule_rows import Planner, end_live_jobs, make_due, make_schedule, read_dispositions, read_fires
from waiting import eventually

if TYPE_CHECKING:
    import asyncpg
    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


async def test_b26_many_schedules_with_a_long_downtime_catch_up_in_one_turn(
    conn: Connection[Record], planner: Planner
) -> None:
    """Each gets one row for all missed instants and one late job."""
    for n in range(50):
        await make_schedule(conn, f"s{n}", cron="* * * * *")
    await conn.execute("update rota.schedule_clocks set next_fire_at = date_trunc('minute', now()) - interval '2 days'")
    await planner.turn()
    counted = await conn.fetch("select disposition, count(*) from rota.fires group by 1")
    assert {row[0]: row[1] for row in counted} == {"enqueued": 50, "skipped_misfire": 50}


async def test_catching_up_takes_no_longer_after_a_longer_downtime(conn: Connection[Record], planner: Planner) -> None:
    for n in range(100):  # an interval counts from its own creation, so no two schedules share a decision
        await make_schedule(conn, f"s{n}", every=timedelta(seconds=1))
    await planner.turn()

    async def catch_up(downtime: timedelta) -> tuple[int, float]:
        await conn.execute("update rota.schedule_clocks set last_fire_at = null")
        await conn.execute(
            "update rota.schedule_definitions set created_at = now() - interval '40 days' + schedule_id * interval '1 ms'"
        )
        await conn.execute(
            "update rota.schedule_clocks set next_fire_at = date_trunc('second', now()) - $1::interval", downtime
        )
        await conn.execute("delete from rota.fires")
        await end_live_jobs(conn)
        started_at = time.perf_counter()
        await planner.turn()
        return await conn.fetchval("select count(*) from rota.fires"), time.perf_counter() - started_at

    await catch_up(HOUR)
    rows, seconds = await catch_up(HOUR)
    long_rows, long_seconds = await catch_up(30 * 24 * HOUR)

    assert long_rows == rows
    assert long_seconds < seconds * 3 + 0.2


async def test_missed_fires_with_a_large_payload_are_recorded_in_parts(
    conn: Connection[Record], planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement for all of them would take longer than a daemon waits for an answer, and would be repeated for ever."""
    await make_schedule(conn, cron=None, every=SECOND, misfire="all", catch_up_limit=1000, overlap="allow")
    await conn.execute(
        "update rota.schedules set payload = (select to_jsonb(string_agg(md5(i::text), '')) from generate_series(1, 30000) as i)"
    )
    await conn.execute(
        "update rota.schedule_definitions set created_at = now() - interval '1 hour', edited_at = now() - interval '1 hour'"
    )
    await conn.execute(
        "update rota.schedule_clocks set next_fire_at = created_at + interval '1 hour' - interval '80 s'"
        " from rota.schedule_definitions"
    )
    counts = []
    record_fires = schedule_queries.record_fires

    async def count_and_record(db: Any, decisions: Any) -> Any:
        counts.append(sum(len(decision.fires) * len(decision.schedules) for decision in decisions))
        return await record_fires(db, decisions)

    monkeypatch.setattr(schedule_queries, "record_fires", count_and_record)
    pause = await planner.turn()
    while not pause:
        pause = await planner.turn()
    assert max(counts) < 60
    ran = [row[0] for row in await conn.fetch("select scheduled_for from rota.jobs order by 1")]
    assert len(ran) >= 80
    assert all(later - earlier == SECOND for earlier, later in itertools.pairwise(ran))
    assert await read_dispositions(conn) == ["enqueued"] * len(ran)


@pytest.mark.parametrize("overlap", ["skip", "queue_one", "replace"])
async def test_misfire_all_runs_missed_instants_one_after_the_other_oldest_first(
    conn: Connection[Record], planner: Planner, overlap: str
) -> None:
    """No missed fire replaces another one."""
    schedule_id = await make_schedule(conn, cron=None, every=HOUR, misfire="all", catch_up_limit=3, overlap=overlap)
    due = await make_due(conn, schedule_id, ago=5 * HOUR)
    await conn.execute("update rota.schedule_definitions set created_at = $1", due - HOUR)
    ran = []
    for _ in range(4):
        for _ in range(2):
            await planner.turn()
        ran += [row[0] for row in await conn.fetch("select scheduled_for from rota.jobs")]
        await end_live_jobs(conn)

    assert ran[0] < ran[1] < ran[2]
    assert len(ran) == 3
    assert await read_dispositions(conn) == ["skipped_misfire", "enqueued", "enqueued", "enqueued"]
    assert (await read_fires(conn))[0][1] > due


async def test_a_fire_on_time_replaces_missed_fires_that_wait(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, cron=None, every=HOUR, misfire="all", catch_up_limit=3, overlap="replace")
    due = await make_due(conn, schedule_id, ago=5 * HOUR)
    await conn.execute("update rota.schedule_definitions set created_at = $1", due - HOUR)
    await planner.turn()
    assert await read_dispositions(conn) == ["skipped_misfire", "enqueued", "waiting", "waiting"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1

    await make_due(conn, schedule_id)
    for _ in range(2):
        await planner.turn()
    assert await read_dispositions(conn) == ["skipped_misfire", "enqueued", "replaced", "replaced", "enqueued"]
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'cancelled'") == 1


async def fire_twice_over_a_live_job(conn: Connection[Record], planner: Planner, overlap: str) -> list[str]:
    """Fire once, then twice more while the first job is live; return the dispositions."""
    schedule_id = await make_schedule(conn, overlap=overlap)
    for ago in (30, 20, 10):
        await make_due(conn, schedule_id, ago=ago * SECOND)
        await planner.turn()
    return await read_dispositions(conn, schedule_id)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("skip", ["enqueued", "skipped_overlap", "skipped_overlap"]),
        ("allow", ["enqueued", "enqueued", "enqueued"]),
        ("queue_one", ["enqueued", "waiting", "skipped_overlap"]),
        ("replace", ["enqueued", "replaced", "enqueued"]),
    ],
)
async def test_the_overlap_setting_decides_about_a_fire_while_a_job_is_live(
    conn: Connection[Record], planner: Planner, overlap: str, expected: list[str]
) -> None:
    if overlap != "replace":
        assert await fire_twice_over_a_live_job(conn, planner, overlap) == expected
        return
    # A running job is only asked to cancel, and the newest fire waits for its end.
    schedule_id = await make_schedule(conn, overlap=overlap)
    await make_due(conn, schedule_id, ago=30 * SECOND)
    await planner.turn()
    await conn.execute(
        """
        update rota.jobs set state = 'running', attempt = 1, fence_token = nextval('rota.fence_tokens'),
            leased_by = gen_random_uuid(), lease_expires_at = now() + interval '30 s'
        """
    )
    for ago in (20, 10):
        await make_due(conn, schedule_id, ago=ago * SECOND)
        await planner.turn()
    assert await read_dispositions(conn, schedule_id) == ["enqueued", "replaced", "waiting"]
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 1

    await end_live_jobs(conn)
    await planner.turn()
    assert await read_dispositions(conn, schedule_id) == expected


async def test_an_open_request_to_cancel_delays_the_replacement_of_no_other_job(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """A client may leave a transaction open in which it has called rota.cancel() for a job of its schedule."""
    schedules = [await make_schedule(conn, f"s{number}", overlap="replace") for number in range(3)]
    for schedule_id in schedules:
        await make_due(conn, schedule_id, ago=20 * SECOND)
    await planner.turn()
    await conn.execute(
        """
        update rota.jobs set state = 'running', attempt = 1, fence_token = nextval('rota.fence_tokens'),
            leased_by = gen_random_uuid(), lease_expires_at = now() + interval '30 s'
        """
    )
    async with pool.acquire() as client, client.transaction():
        cancelled = await client.fetchval("select job_id from rota.jobs where schedule_id = $1", schedules[1])
        await client.execute("select rota.cancel($1)", cancelled)
        for schedule_id in schedules:
            await make_due(conn, schedule_id, ago=10 * SECOND)
        async with asyncio.timeout(1.5):
            await planner.turn()
        requested = {row[0] for row in await conn.fetch("select job_id from rota.cancel_requests")}
        running = {row[0] for row in await conn.fetch("select job_id from rota.jobs")}
        assert requested == running - {cancelled}
    await planner.turn()
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 3


async def test_a_replaced_job_is_logged_like_any_cancelled_job(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, overlap="replace")
    for ago in (20, 10):
        await make_due(conn, schedule_id, ago=ago * SECOND)
        await planner.turn()
    assert await conn.fetchval("select outcome from rota.job_runs") == "cancelled"
    assert planner.events_named("jobs.replaced") == planner.events_named("jobs.cancelled") == [{"count": 1}]


async def test_a_job_that_waits_for_a_retry_counts_as_live(conn: Connection[Record], planner: Planner) -> None:
    """Otherwise an outage of an hour could leave sixty jobs of one schedule that run at once."""
    schedule_id = await make_schedule(conn)
    await make_due(conn, schedule_id, ago=SECOND * 5)
    await planner.turn()
    await conn.execute("update rota.jobs set attempt = 3, run_at = now() + interval '1 hour'")
    await make_due(conn, schedule_id)
    await planner.turn()
    assert await read_dispositions(conn, schedule_id) == ["enqueued", "skipped_overlap"]


async def test_b53_a_waiting_fire_is_enqueued_after_the_live_job_has_ended(
    conn: Connection[Record], planner: Planner
) -> None:
    assert await fire_twice_over_a_live_job(conn, planner, "queue_one") == ["enqueued", "waiting", "skipped_overlap"]

    await planner.turn()
    assert await conn.fetchval("select count(*) from rota.jobs") == 1

    await end_live_jobs(conn)
    await planner.turn()
    assert await read_dispositions(conn) == ["enqueued", "enqueued", "skipped_overlap"]

    job = await conn.fetchrow("select scheduled_for, exclusive from rota.jobs")
    assert job is not None
    assert (job["scheduled_for"], job["exclusive"]) == ((await read_fires(conn))[1][1], True)


async def test_a_waiting_fire_whose_job_is_rejected_keeps_waiting_and_blocks_no_other_schedule(
    conn: Connection[Record], planner: Planner
) -> None:
    """The user may have added a constraint after the fire."""
    await fire_twice_over_a_live_job(conn, planner, "queue_one")
    await end_live_jobs(conn)
    await conn.execute('alter table rota.jobs add constraint "no exclusive jobs" check (not exclusive)')
    other = await make_schedule(conn, "other", overlap="allow")
    await make_due(conn, other)
    await planner.turn()
    assert await read_dispositions(conn, other) == ["enqueued"]

    await conn.execute('alter table rota.jobs drop constraint "no exclusive jobs"')
    await planner.turn()
    assert await conn.fetchval("select count(*) from rota.jobs where exclusive") == 1


async def test_a_job_referenced_by_a_foreign_key_is_not_replaced_until_the_reference_is_gone(
    conn: Connection[Record], planner: Planner
) -> None:
    """The fire that would replace it waits."""
    schedule = await make_schedule(conn, overlap="replace")
    await make_due(conn, schedule, ago=20 * SECOND)
    await planner.turn()
    await conn.execute("create table public.orders (job_id bigint references rota.jobs)")
    await conn.execute("insert into public.orders select job_id from rota.jobs")
    await make_due(conn, schedule, ago=10 * SECOND)
    await planner.turn()
    assert await read_dispositions(conn) == ["enqueued", "waiting"]

    await conn.execute("drop table public.orders")
    assert await queries.answer_cancel_requests(conn, limit=10), "which the reapers do"

    await planner.turn()
    assert await read_dispositions(conn) == ["enqueued", "enqueued"]


async def test_eight_planners_promote_a_waiting_fire_once(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    await fire_twice_over_a_live_job(conn, planner, "queue_one")
    await end_live_jobs(conn)
    await asyncio.gather(*(Planner(pool).turn() for _ in range(8)))
    assert await conn.fetchval("select count(*) from rota.jobs") == 1
    assert await conn.fetchval("select count(*) from rota.fires where disposition = 'enqueued'") == 2


async def test_a_job_committed_during_the_decision_counts_as_an_overlap(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """The decision's snapshot cannot see the redriven job, but the unique index does."""
    schedule_id = await make_schedule(conn)
    due = await make_due(conn, schedule_id)
    async with database.connect() as operator:
        redrive = operator.transaction()
        await redrive.start()
        await operator.execute(
            "insert into rota.jobs (handler, schedule_id, exclusive) values ('h', $1, true)", schedule_id
        )
        turn = asyncio.ensure_future(planner.turn())
        held_up = "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock'"
        await eventually(lambda: conn.fetchval(held_up), what="the insert that waits for the redriven job")
        await redrive.commit()
        await turn

    assert await read_fires(conn) == [("skipped_overlap", due)]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1
