"""The scheduler turns due schedules into fires and jobs, once per schedule and instant, whichever node decides."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import make_dead_letter
from rota.db import queries, schedule_queries
from rota.domain.shards import EVERY_SHARD
from rota.lifecycle import scheduler as scheduler_module
from rota.runtime.clock import boottime
from rota.services import schedule_stats
from rota.services.schedule_stats import ScheduleStats
from schedule_rows import (
    Planner,
    clock,
    dispositions,
    end_live_jobs,
    fires,
    make_due,
    make_schedule,
    quiet_telemetry,
    utc,
)
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime

    import asyncpg
    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


@asynccontextmanager
async def open_transaction(database: Database, statement: str) -> AsyncIterator[Connection[Record]]:
    """Execute a statement in a transaction that stays open until the block ends."""
    async with database.connect() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(statement)
        yield other
        await transaction.rollback()


async def test_b31_a_new_schedule_is_planned_and_does_not_fire(conn: Connection[Record], planner: Planner) -> None:
    """The next fire is strictly later than the edit."""
    schedule_id = await make_schedule(conn, cron="* * * * *")
    await planner.turn()
    assert await fires(conn) == []
    assert (await clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


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
    assert (await clock(conn, schedule_id))["last_fire_at"] == due


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

    decided = sum(events["decided"] for planner in planners for events in planner.said("fires.recorded"))
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
    assert await dispositions(conn) == ["skipped_edit"]
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
        assert (await dispositions(conn, locked), await dispositions(conn, other)) == ([], ["enqueued"])
    await planner.turn()

    assert await dispositions(conn, locked) == ["enqueued"]


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

    assert await dispositions(conn, schedule_id) == ["enqueued", "skipped_overlap"]
    assert await dispositions(conn, other) == ["enqueued"]


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
    before = await fires(conn, schedule_id)
    letter = await make_dead_letter(conn, schedule_id=schedule_id)
    await make_due(conn, other)

    async with open_transaction(database, f"select rota.redrive({letter})"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await fires(conn, schedule_id), await dispositions(conn, other)) == (before, ["enqueued"])
    await planner.turn()

    assert await dispositions(conn, schedule_id) == ["enqueued"] * (2 if is_waiting else 1)


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
    assert await dispositions(conn) == ["skipped_misfire", "enqueued", "enqueued", "enqueued"]
    assert (await fires(conn))[0][1] > due


async def test_a_fire_on_time_replaces_missed_fires_that_wait(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, cron=None, every=HOUR, misfire="all", catch_up_limit=3, overlap="replace")
    due = await make_due(conn, schedule_id, ago=5 * HOUR)
    await conn.execute("update rota.schedule_definitions set created_at = $1", due - HOUR)
    await planner.turn()
    assert await dispositions(conn) == ["skipped_misfire", "enqueued", "waiting", "waiting"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1

    await make_due(conn, schedule_id)
    for _ in range(2):
        await planner.turn()
    assert await dispositions(conn) == ["skipped_misfire", "enqueued", "replaced", "replaced", "enqueued"]
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'cancelled'") == 1


async def fire_twice_over_a_live_job(conn: Connection[Record], planner: Planner, overlap: str) -> list[str]:
    """Fire once, then twice more while the first job is live; return the dispositions."""
    schedule_id = await make_schedule(conn, overlap=overlap)
    for ago in (30, 20, 10):
        await make_due(conn, schedule_id, ago=ago * SECOND)
        await planner.turn()
    return await dispositions(conn, schedule_id)


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
    assert await dispositions(conn, schedule_id) == ["enqueued", "replaced", "waiting"]
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 1

    await end_live_jobs(conn)
    await planner.turn()
    assert await dispositions(conn, schedule_id) == expected


async def test_a_replaced_job_is_logged_like_any_cancelled_job(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, overlap="replace")
    for ago in (20, 10):
        await make_due(conn, schedule_id, ago=ago * SECOND)
        await planner.turn()
    assert await conn.fetchval("select outcome from rota.job_runs") == "cancelled"
    assert planner.said("jobs.replaced") == planner.said("jobs.cancelled") == [{"count": 1}]


async def test_a_job_that_waits_for_a_retry_counts_as_live(conn: Connection[Record], planner: Planner) -> None:
    """Otherwise an outage of an hour could leave sixty jobs of one schedule that run at once."""
    schedule_id = await make_schedule(conn)
    await make_due(conn, schedule_id, ago=SECOND * 5)
    await planner.turn()
    await conn.execute("update rota.jobs set attempt = 3, run_at = now() + interval '1 hour'")
    await make_due(conn, schedule_id)
    await planner.turn()
    assert await dispositions(conn, schedule_id) == ["enqueued", "skipped_overlap"]


async def test_b53_a_waiting_fire_is_enqueued_after_the_live_job_has_ended(
    conn: Connection[Record], planner: Planner
) -> None:
    assert await fire_twice_over_a_live_job(conn, planner, "queue_one") == ["enqueued", "waiting", "skipped_overlap"]

    await planner.turn()
    assert await conn.fetchval("select count(*) from rota.jobs") == 1

    await end_live_jobs(conn)
    await planner.turn()
    assert await dispositions(conn) == ["enqueued", "enqueued", "skipped_overlap"]

    job = await conn.fetchrow("select scheduled_for, exclusive from rota.jobs")
    assert job is not None
    assert (job["scheduled_for"], job["exclusive"]) == ((await fires(conn))[1][1], True)


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
    assert await dispositions(conn, other) == ["enqueued"]

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
    assert await dispositions(conn) == ["enqueued", "waiting"]

    await conn.execute("drop table public.orders")
    assert await queries.answer_cancel_requests(conn, limit=10), "which the reapers do"

    await planner.turn()
    assert await dispositions(conn) == ["enqueued", "enqueued"]


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

    assert await fires(conn) == [("skipped_overlap", due)]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_a_schedule_resumes_at_resume_at_and_records_the_pause_in_one_row(
    conn: Connection[Record], planner: Planner
) -> None:
    schedule_id = await make_schedule(conn, cron=None, every=timedelta(minutes=10))
    await conn.execute("select rota.pause_schedule('s', resume_at => now() + interval '1 day')")
    await planner.turn()
    assert await fires(conn) == []

    await conn.execute(
        """
        update rota.schedule_definitions set created_at = now() - interval '3 h', paused_at = now() - interval '2 h',
            edited_at = now() - interval '2 h', resume_at = now() - interval '1 s'
        """
    )
    await planner.turn()
    assert not await conn.fetchval("select paused from rota.schedules")
    assert len(planner.said("schedules.resumed")) == 1

    await planner.turn()
    row = await conn.fetchrow("select * from rota.fires")
    assert row is not None
    assert row["disposition"] == "skipped_paused"
    assert row["missed_count"] in {11, 12}
    assert (await clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


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
        assert (await dispositions(conn, other), planner.said("schedules.resumed")) == (["enqueued"], [])
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

    assert await dispositions(conn) == ["skipped_paused"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0
    assert (await clock(conn, schedule_id))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_schedule_does_not_fire_at_or_after_its_end(conn: Connection[Record], planner: Planner) -> None:
    due = await conn.fetchval("select date_trunc('second', now()) - interval '2 s'")
    schedule_id = await make_schedule(conn, cron=None, every=SECOND, start_at=due - HOUR, end_at=due + SECOND)
    await conn.execute("update rota.schedule_clocks set next_fire_at = $1", due)
    await planner.turn()
    await planner.turn()
    assert await fires(conn) == [("enqueued", due)]
    assert (await clock(conn, schedule_id))["next_fire_at"] is None
    assert await conn.fetchval("select state from rota.schedules") == "ended"


async def test_a_manual_run_does_not_overlap_the_next_fire(conn: Connection[Record], planner: Planner) -> None:
    schedule_id = await make_schedule(conn, overlap="skip")
    await conn.execute("select rota.run_schedule_now('s')")
    await conn.execute("update rota.fires set scheduled_for = scheduled_for - interval '1 h'")
    await make_due(conn, schedule_id)
    await planner.turn()
    assert await dispositions(conn) == ["run_now", "enqueued"]
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

    assert await fires(conn) == expected


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

    assert await fires(conn) == [("enqueued", each) for each in instants]
    assert await conn.fetchval("select count(distinct scheduled_for) from rota.jobs") == len(instants)


async def test_b35_an_unknown_timezone_stops_only_its_own_schedule(conn: Connection[Record], planner: Planner) -> None:
    """The schedule gets an invalid_reason and an error in the log; it never falls back to UTC."""
    wrong = await make_schedule(conn, "wrong", timezone="Europe/Berlln")
    right = await make_schedule(conn, "right", timezone="Europe/Berlin")
    await planner.turn()
    assert "Europe/Berlin" in (await clock(conn, wrong))["invalid_reason"]
    assert (await clock(conn, right))["next_fire_at"] is not None
    assert [event["schedule"] for event in planner.said("schedule.invalid")] == ["wrong"]

    await conn.execute("update rota.schedules set timezone = 'Europe/Berlin' where name = 'wrong'")
    await planner.turn()
    assert (await clock(conn, wrong))["next_fire_at"] is not None


async def test_a_new_node_plans_invalid_schedules_again(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """The new node may have newer zone data."""
    schedule_id = await make_schedule(conn, timezone="Europe/Berlln")
    await planner.turn()
    await conn.execute("update rota.schedule_definitions set timezone = 'Europe/Berlin'")
    await conn.execute("update rota.schedule_clocks set next_fire_at = null, invalid_reason = 'old data'")
    await planner.turn()
    assert (await clock(conn, schedule_id))["next_fire_at"] is None
    await Planner(pool).turn()
    assert (await clock(conn, schedule_id))["next_fire_at"] is not None


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
    right = [(await clock(conn, schedule_id))["next_fire_at"] for schedule_id in (yearly, *others[1:])]
    assert right[0].hour == 4

    await conn.execute(
        "update rota.schedule_clocks set next_fire_at = next_fire_at - interval '1 hour' where schedule_id = $1", yearly
    )
    assert await conn.fetchval("select planned_with from rota.meta") is not None

    again = Planner(pool)
    await again.turn()
    assert (await clock(conn, yearly))["next_fire_at"] == right[0] - timedelta(hours=1), "found by ourselves"

    await conn.execute("update rota.meta set planned_with = 'rota 0.1, tzdata 2023c'")
    again = Planner(pool)
    await again.turn()
    assert [(await clock(conn, schedule_id))["next_fire_at"] for schedule_id in (yearly, *others[1:])] == right
    assert await dispositions(conn) == ["enqueued"], "what is due is decided about; nothing fires because of new data"
    assert [event["count"] for event in again.said("schedules.moved")] == [1]
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

    assert (await dispositions(conn, bad), await dispositions(conn, good)) == ([], ["enqueued"])
    assert "no later than tomorrow" in (await clock(conn, bad))["invalid_reason"]


async def test_a_node_serves_its_own_shards_and_after_two_seconds_those_of_others(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """This covers the shards of a dead node."""
    schedule_id = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != schedule_id % 256])
    await make_due(conn, schedule_id, ago=SECOND)
    await elsewhere.turn()
    assert await fires(conn) == []
    await make_due(conn, schedule_id, ago=3 * SECOND)
    await elsewhere.turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_a_leaving_node_decides_nothing(conn: Connection[Record], pool: asyncpg.Pool[Record]) -> None:
    await make_due(conn, await make_schedule(conn), ago=HOUR)
    await Planner(pool, shards=None).turn()
    assert await fires(conn) == []


async def test_a_node_without_shards_decides_what_is_two_seconds_late(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """With hundreds of nodes, the only survivor may have no shard."""
    await make_due(conn, await make_schedule(conn), ago=3 * SECOND)
    await Planner(pool, shards=()).turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_a_change_of_nodes_makes_a_node_search_all_shards_once(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    schedule_id = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != schedule_id % 256])
    await make_due(conn, schedule_id)
    elsewhere.scheduler.nodes_changed()
    await elsewhere.turn()
    assert await dispositions(conn) == ["enqueued"]


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

    assert await dispositions(conn) == ["enqueued"]


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


async def test_successes_and_failures_of_schedules_are_counted(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """A success resets the number of consecutive failures."""
    one, other, deleted = [await make_schedule(conn, name) for name in ("one", "other", "gone")]
    await conn.execute("delete from rota.schedules where name = 'gone'")
    stats = ScheduleStats(pool, quiet_telemetry())
    for schedule, succeeded in ((one, False), (other, True), (one, False), (other, False), (deleted, True)):
        stats.add(schedule, succeeded=succeeded)
    await stats.run_once()
    first, second = await clock(conn, one), await clock(conn, other)
    assert (first["last_success_at"], first["consecutive_failures"]) == (None, 2)
    assert (second["last_success_at"] is not None, second["consecutive_failures"]) == (True, 1)

    stats.add(one, succeeded=True)
    await stats.run_once()
    assert (await clock(conn, one))["consecutive_failures"] == 0


async def test_statistics_of_a_locked_schedule_are_written_later(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    schedule_id = await make_schedule(conn)
    stats = ScheduleStats(pool, quiet_telemetry())
    stats.add(schedule_id, succeeded=False)
    async with open_transaction(database, "update rota.schedules set paused = true"):
        await stats.run_once()
    assert (await clock(conn, schedule_id))["consecutive_failures"] == 0
    await stats.run_once()
    assert (await clock(conn, schedule_id))["consecutive_failures"] == 1


async def test_a_stopping_node_writes_the_statistics_of_all_unlocked_schedules(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither pauses between batches nor waits for a lock."""
    monkeypatch.setattr(schedule_stats, "BATCH", 1)
    schedule_ids = [await make_schedule(conn, name) for name in ("one", "other", "edited")]
    stats = ScheduleStats(pool, quiet_telemetry())
    for schedule in schedule_ids:
        stats.add(schedule, succeeded=False)
    async with open_transaction(database, "update rota.schedules set paused = true where name = 'edited'"):
        await stats.finish()
    assert [(await clock(conn, each))["consecutive_failures"] for each in schedule_ids] == [1, 1, 0]
