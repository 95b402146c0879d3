"""Step 7: due schedules become fires and jobs, once for each schedule and instant, whoever looks."""

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
from rota.services import schedule_stats as track_record
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
async def held(database: Database, statement: str) -> AsyncIterator[Connection[Record]]:
    """Carry out a statement in a transaction that stays open."""
    async with database.connect() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(statement)
        yield other
        await transaction.rollback()


# ── the plain path ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_schedule_is_planned_and_does_not_fire(conn: Connection[Record], planner: Planner) -> None:
    """B31. What comes next lies strictly after the edit."""
    made = await make_schedule(conn, cron="* * * * *")
    await planner.turn()
    assert await fires(conn) == []
    assert (await clock(conn, made))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_due_instant_becomes_a_fire_and_a_job_with_the_schedules_terms(
    conn: Connection[Record], planner: Planner
) -> None:
    """Everything that was written of the job goes with it."""
    made = await make_schedule(
        conn, payload='{"n": 1}', priority=2, max_attempts=3, timeout=SECOND, meta='{"tenant": 7}', start_within=HOUR
    )
    due = await make_due(conn, made)
    await planner.turn()
    job = await conn.fetchrow("select *, start_by - greatest(run_at, created_at) as to_begin from rota.jobs")
    assert job is not None
    assert (job["schedule_id"], job["scheduled_for"], job["run_at"], job["exclusive"]) == (made, due, due, True)
    assert (job["payload"], job["priority"], job["max_attempts"], job["queue"]) == ('{"n": 1}', 2, 3, "default")
    assert (job["timeout"], job["meta"], job["to_begin"]) == (SECOND, '{"tenant": 7}', HOUR)
    assert await conn.fetchval("select job_id from rota.fires") == job["job_id"]
    assert (await clock(conn, made))["last_fire_at"] == due


async def test_jobs_take_the_queue_of_their_handler(conn: Connection[Record], planner: Planner) -> None:
    """As jobs do that are inserted by hand."""
    await conn.execute("insert into rota.handlers (handler, queue) values ('h', 'mail')")
    await make_due(conn, await make_schedule(conn))
    await planner.turn()
    assert await conn.fetchval("select queue from rota.jobs") == "mail"


async def test_jitter_moves_run_at_and_not_scheduled_for(conn: Connection[Record], planner: Planner) -> None:
    """The instant's name stays the nominal one."""
    made = await make_schedule(conn, jitter=HOUR)
    due = await make_due(conn, made)
    await planner.turn()
    row = await conn.fetchrow("select scheduled_for, run_at - scheduled_for as later from rota.jobs")
    assert row is not None
    assert row["scheduled_for"] == due
    assert row["later"] == await conn.fetchval("select rota.jitter_offset($1, '1 hour')", made)


async def test_eight_planners_that_ignore_shards_give_one_fire_each(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """B39. Correctness never rests on who looks: losers write nothing and see no error."""
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
    decided = sum(told["decided"] for planner in planners for told in planner.said("fires.recorded"))
    assert decided == 3 * len(names)


async def test_a_decision_on_an_older_version_touches_nothing(conn: Connection[Record]) -> None:
    """Read, then edited, then written: the edit stands."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    await conn.execute("update rota.schedules set cron = '1 1 * * *'")
    fires = [(due, "enqueue", None, None, None)]
    decided, told = await schedule_queries.record_fires(
        conn, [schedule_queries.Decision([(made, 1)], due, due + HOUR, due, fires)]
    )
    assert (decided, told) == (0, [])
    assert await dispositions(conn) == ["skipped_edit"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_a_lost_reply_is_no_second_fire(conn: Connection[Record]) -> None:
    """The same statement sent again finds another next_fire_at."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    again = [schedule_queries.Decision([(made, 1)], due, due + HOUR, due, [(due, "enqueue", None, None, None)])]
    assert [(await schedule_queries.record_fires(conn, again))[0] for _ in range(2)] == [1, 0]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


async def test_a_schedule_locked_by_its_editor_holds_up_nobody(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """An open transaction in somebody's console must not be everybody's outage."""
    locked = await make_schedule(conn, "locked")
    other = await make_schedule(conn, "other")
    for each in (locked, other):
        await make_due(conn, each)
    async with held(database, "update rota.schedules set cron = '1 1 * * *' where name = 'locked'"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await dispositions(conn, locked), await dispositions(conn, other)) == ([], ["enqueued"])
    await planner.turn()
    assert await dispositions(conn, locked) == ["enqueued"]


async def test_a_job_locked_by_somebody_holds_up_nobody(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """A handler's transaction that has completed its job and stays open is an overlap, not a standstill."""
    made = await make_schedule(conn)
    other = await make_schedule(conn, "other")
    await make_due(conn, made)
    await planner.turn()
    for each in (made, other):
        await make_due(conn, each)
    async with held(database, "delete from rota.jobs"):
        await asyncio.wait_for(planner.turn(), 5)
    assert await dispositions(conn, made) == ["enqueued", "skipped_overlap"]
    assert await dispositions(conn, other) == ["enqueued"]


@pytest.mark.parametrize("waits", [False, True], ids=["a fire that is due", "a fire that waits"])
async def test_a_redrive_in_an_open_transaction_holds_up_its_own_schedule_alone(
    database: Database, conn: Connection[Record], planner: Planner, *, waits: bool
) -> None:
    """Whether its job is live nobody can tell before that transaction ends: no reason for all the others to wait for it."""
    made = await make_schedule(conn, overlap="queue_one")
    other = await make_schedule(conn, "other")
    if waits:
        for ago in (30, 20):
            await make_due(conn, made, ago=ago * SECOND)
            await planner.turn()
        await end_live_jobs(conn)
    else:
        await make_due(conn, made)
    before = await fires(conn, made)
    letter = await make_dead_letter(conn, schedule_id=made)
    await make_due(conn, other)
    async with held(database, f"select rota.redrive({letter})"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await fires(conn, made), await dispositions(conn, other)) == (before, ["enqueued"])
    await planner.turn()
    assert await dispositions(conn, made) == ["enqueued"] * (2 if waits else 1)


# ── missed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_schedules_with_long_downtime_catch_up_in_one_turn(
    conn: Connection[Record], planner: Planner
) -> None:
    """B26. One row for the missed ones and one late job each, however long it was."""
    for n in range(50):
        await make_schedule(conn, f"s{n}", cron="* * * * *")
    await conn.execute("update rota.schedule_clocks set next_fire_at = date_trunc('minute', now()) - interval '2 days'")
    await planner.turn()
    counted = await conn.fetch("select disposition, count(*) from rota.fires group by 1")
    assert {row[0]: row[1] for row in counted} == {"enqueued": 50, "skipped_misfire": 50}


async def test_catching_up_costs_the_same_however_long_nobody_was_up(
    conn: Connection[Record], planner: Planner
) -> None:
    """A fleet that comes back after a long outage must not spend the next one on counting what it has missed."""
    for n in range(100):  # beats, each from an instant of its own, so that none is decided along with another
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
        began = time.perf_counter()
        await planner.turn()
        return await conn.fetchval("select count(*) from rota.fires"), time.perf_counter() - began

    await catch_up(HOUR)
    rows, took = await catch_up(HOUR)
    rows_later, took_later = await catch_up(30 * 24 * HOUR)

    assert rows_later == rows
    assert took_later < took * 3 + 0.2


@pytest.mark.parametrize("overlap", ["skip", "queue_one", "replace"])
async def test_all_of_them_run_in_turn(conn: Connection[Record], planner: Planner, overlap: str) -> None:
    """misfire = 'all' catches up without two at once, oldest first; none of them replaces the one before it."""
    made = await make_schedule(conn, cron=None, every=HOUR, misfire="all", catch_up_limit=3, overlap=overlap)
    due = await make_due(conn, made, ago=5 * HOUR)
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


async def test_one_on_time_replaces_what_is_being_caught_up(conn: Connection[Record], planner: Planner) -> None:
    """Replace means that the newest matters: the line gives way, as any fire that waits does."""
    made = await make_schedule(conn, cron=None, every=HOUR, misfire="all", catch_up_limit=3, overlap="replace")
    due = await make_due(conn, made, ago=5 * HOUR)
    await conn.execute("update rota.schedule_definitions set created_at = $1", due - HOUR)
    await planner.turn()
    assert await dispositions(conn) == ["skipped_misfire", "enqueued", "waiting", "waiting"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1
    await make_due(conn, made)
    for _ in range(2):
        await planner.turn()
    assert await dispositions(conn) == ["skipped_misfire", "enqueued", "replaced", "replaced", "enqueued"]
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'cancelled'") == 1


# ── overlap ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def fire_twice_over_a_live_job(conn: Connection[Record], planner: Planner, overlap: str) -> list[str]:
    """Fire, and twice more while the first job is live; say what became of the three."""
    made = await make_schedule(conn, overlap=overlap)
    for ago in (30, 20, 10):
        await make_due(conn, made, ago=ago * SECOND)
        await planner.turn()
    return await dispositions(conn, made)


@pytest.mark.parametrize(
    ("overlap", "became"),
    [
        ("skip", ["enqueued", "skipped_overlap", "skipped_overlap"]),
        ("allow", ["enqueued", "enqueued", "enqueued"]),
        ("queue_one", ["enqueued", "waiting", "skipped_overlap"]),
        ("replace", ["enqueued", "replaced", "enqueued"]),
    ],
)
async def test_overlap(conn: Connection[Record], planner: Planner, overlap: str, became: list[str]) -> None:
    """What happens to a fire whose predecessor still runs is the schedule's to say."""
    if overlap != "replace":
        assert await fire_twice_over_a_live_job(conn, planner, overlap) == became
        return
    # A live job that nobody has claimed is cancelled at once; one that runs is asked to, and the newest fire waits.
    made = await make_schedule(conn, overlap=overlap)
    await make_due(conn, made, ago=30 * SECOND)
    await planner.turn()
    await conn.execute(
        """
        update rota.jobs set state = 'running', attempt = 1, fence_token = nextval('rota.fence_tokens'),
            leased_by = gen_random_uuid(), lease_expires_at = now() + interval '30 s'
        """
    )
    for ago in (20, 10):
        await make_due(conn, made, ago=ago * SECOND)
        await planner.turn()
    assert await dispositions(conn, made) == ["enqueued", "replaced", "waiting"]
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 1
    await end_live_jobs(conn)
    await planner.turn()
    assert await dispositions(conn, made) == became


async def test_a_waiting_job_that_is_replaced_is_told_of_like_any_other_that_is_cancelled(
    conn: Connection[Record], planner: Planner
) -> None:
    """Who counts how jobs end by the log must not miss those that the scheduler has ended."""
    made = await make_schedule(conn, overlap="replace")
    for ago in (20, 10):
        await make_due(conn, made, ago=ago * SECOND)
        await planner.turn()
    assert await conn.fetchval("select outcome from rota.job_runs") == "cancelled"
    assert planner.said("jobs.replaced") == planner.said("jobs.cancelled") == [{"count": 1}]


async def test_a_job_that_waits_for_its_retry_still_counts_as_live(conn: Connection[Record], planner: Planner) -> None:
    """Otherwise an outage of an hour would leave sixty jobs of one schedule running into each other."""
    made = await make_schedule(conn)
    await make_due(conn, made, ago=SECOND * 5)
    await planner.turn()
    await conn.execute("update rota.jobs set attempt = 3, run_at = now() + interval '1 hour'")
    await make_due(conn, made)
    await planner.turn()
    assert await dispositions(conn, made) == ["enqueued", "skipped_overlap"]


async def test_a_waiting_fire_is_enqueued_when_its_turn_comes(conn: Connection[Record], planner: Planner) -> None:
    """B53. What holds it back is read from live rows: no end of a job has to be noticed by anybody."""
    assert await fire_twice_over_a_live_job(conn, planner, "queue_one") == ["enqueued", "waiting", "skipped_overlap"]
    await planner.turn()
    assert await conn.fetchval("select count(*) from rota.jobs") == 1
    await end_live_jobs(conn)
    await planner.turn()
    assert await dispositions(conn) == ["enqueued", "enqueued", "skipped_overlap"]
    job = await conn.fetchrow("select scheduled_for, exclusive from rota.jobs")
    assert job is not None
    assert (job["scheduled_for"], job["exclusive"]) == ((await fires(conn))[1][1], True)


async def test_a_waiting_fire_whose_job_is_refused_waits_and_holds_up_no_other_schedule(
    conn: Connection[Record], planner: Planner
) -> None:
    """A constraint of the user's that came after the fire: it fells nobody, and is told of."""
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


async def test_a_job_to_which_a_foreign_key_clings_is_not_replaced_and_fells_nobody(
    conn: Connection[Record], planner: Planner
) -> None:
    """It can't be cancelled while the user's row points to it; the fire that is to replace it waits."""
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


async def test_several_planners_promote_a_waiting_fire_once(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """Promotion is a conditional write like any other."""
    await fire_twice_over_a_live_job(conn, planner, "queue_one")
    await end_live_jobs(conn)
    await asyncio.gather(*(Planner(pool).turn() for _ in range(8)))
    assert await conn.fetchval("select count(*) from rota.jobs") == 1
    assert await conn.fetchval("select count(*) from rota.fires where disposition = 'enqueued'") == 2


async def test_the_index_decides_where_a_read_could_not_see(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """A redriven job that commits between our snapshot and our insert is an overlap all the same."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    async with database.connect() as operator:
        redrive = operator.transaction()
        await redrive.start()
        await operator.execute("insert into rota.jobs (handler, schedule_id, exclusive) values ('h', $1, true)", made)
        turn = asyncio.ensure_future(planner.turn())
        held_up = "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock'"
        await eventually(lambda: conn.fetchval(held_up), what="the insert that waits for the redriven job")
        await redrive.commit()
        await turn
    assert await fires(conn) == [("skipped_overlap", due)]
    assert await conn.fetchval("select count(*) from rota.jobs") == 1


# ── pause, resume, end ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_paused_schedule_resumes_itself_and_accounts_for_the_pause(
    conn: Connection[Record], planner: Planner
) -> None:
    """resume_at is kept by the daemons; what fell into the pause is one row."""
    made = await make_schedule(conn, cron=None, every=timedelta(minutes=10))
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
    assert (await clock(conn, made))["next_fire_at"] > await conn.fetchval("select now()")


async def test_a_schedule_whose_clock_is_locked_is_resumed_later_and_holds_up_nobody(
    database: Database, conn: Connection[Record], planner: Planner
) -> None:
    """A backfill or a redrive in an open transaction locks it; the edit that a resumption is would wait for that."""
    made = await make_schedule(conn)
    other = await make_schedule(conn, "other")
    await make_due(conn, other)
    await conn.execute("select rota.pause_schedule('s', resume_at => now() - interval '1 s')")
    async with held(database, "select rota.backfill_schedule('s', array[now() - interval '1 day'])"):
        await asyncio.wait_for(planner.turn(), 5)
        assert (await dispositions(conn, other), planner.said("schedules.resumed")) == (["enqueued"], [])
        assert not planner.scheduler._wake._flag.is_set()  # or it would look again at once, for as long as that lasts
    await planner.turn()
    assert not await conn.fetchval("select paused from rota.schedules where schedule_id = $1", made)


async def test_what_fell_into_a_pause_does_not_run_after_it(conn: Connection[Record], planner: Planner) -> None:
    """Resumed by hand: the pause is one row, also where all that was missed is to run, and what comes next lies ahead."""
    made = await make_schedule(conn, cron=None, every=timedelta(minutes=10), misfire="all", on_time_within=3 * HOUR)
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
    assert (await clock(conn, made))["next_fire_at"] > await conn.fetchval("select now()")


async def test_at_its_end_a_schedule_fires_no_more(conn: Connection[Record], planner: Planner) -> None:
    """The last instant lies before end_at, and nothing is left to be due."""
    due = await conn.fetchval("select date_trunc('second', now()) - interval '2 s'")
    made = await make_schedule(conn, cron=None, every=SECOND, start_at=due - HOUR, end_at=due + SECOND)
    await conn.execute("update rota.schedule_clocks set next_fire_at = $1", due)
    await planner.turn()
    await planner.turn()
    assert await fires(conn) == [("enqueued", due)]
    assert (await clock(conn, made))["next_fire_at"] is None
    assert await conn.fetchval("select state from rota.schedules") == "ended"


async def test_a_run_by_hand_is_no_overlap(conn: Connection[Record], planner: Planner) -> None:
    """It is never exclusive: the next instant runs beside it."""
    made = await make_schedule(conn, overlap="skip")
    await conn.execute("select rota.run_schedule_now('s')")
    await conn.execute("update rota.fires set scheduled_for = scheduled_for - interval '1 h'")
    await make_due(conn, made)
    await planner.turn()
    assert await dispositions(conn) == ["run_now", "enqueued"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 2


# ── daylight saving ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("columns", "became"),
    [
        ({}, [("enqueued", utc(2026, 3, 29, 1)), ("enqueued", utc(2026, 3, 30, 0, 30))]),
        ({"dst_gap": "skip"}, [("skipped_gap", utc(2026, 3, 29, 1)), ("enqueued", utc(2026, 3, 30, 0, 30))]),
    ],
)
async def test_what_the_clock_jumps_over_fires_at_the_jump_or_is_told_of(
    conn: Connection[Record], planner: Planner, columns: dict[str, Any], became: list[tuple[str, datetime]]
) -> None:
    """Half past two on the night of 29 March 2026 in Vienna."""
    await make_schedule(
        conn, cron="30 2 * * *", timezone="Europe/Vienna", misfire="all", overlap="allow",
        end_at=utc(2026, 3, 30, 12), **columns,
    )  # fmt: skip
    await conn.execute(
        "update rota.schedule_definitions set created_at = '2026-01-01', edited_at = '2026-03-28 12:00+00'"
    )
    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
    await planner.turn()
    assert await fires(conn) == became


@pytest.mark.parametrize(
    ("fold", "instants"), [("first", [utc(2025, 10, 26, 0, 30)]), ("both", [utc(2025, 10, 26, n, 30) for n in (0, 1)])]
)
async def test_what_the_clock_shows_twice_fires_once_or_twice(
    conn: Connection[Record], planner: Planner, fold: str, instants: list[datetime]
) -> None:
    """Half past two on the night of 26 October 2025 in Vienna: two instants, two fires, two keys."""
    await make_schedule(
        conn, cron="30 2 * * *", timezone="Europe/Vienna", misfire="all", overlap="allow",
        end_at=utc(2025, 10, 26, 12), dst_fold=fold,
    )  # fmt: skip
    await conn.execute(
        "update rota.schedule_definitions set created_at = '2025-01-01', edited_at = '2025-10-25 12:00+00'"
    )
    await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
    await planner.turn()
    assert await fires(conn) == [("enqueued", each) for each in instants]
    assert await conn.fetchval("select count(distinct scheduled_for) from rota.jobs") == len(instants)


# ── invalid ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_zone_nobody_knows_stops_that_schedule_only(conn: Connection[Record], planner: Planner) -> None:
    """B35. An ERROR line and invalid_reason; never a silent UTC, never a standstill for the others."""
    wrong = await make_schedule(conn, "wrong", timezone="Europe/Berlln")
    right = await make_schedule(conn, "right", timezone="Europe/Berlin")
    await planner.turn()
    assert "Europe/Berlin" in (await clock(conn, wrong))["invalid_reason"]
    assert (await clock(conn, right))["next_fire_at"] is not None
    assert [said["schedule"] for said in planner.said("schedule.invalid")] == ["wrong"]
    await conn.execute("update rota.schedules set timezone = 'Europe/Berlin' where name = 'wrong'")
    await planner.turn()
    assert (await clock(conn, wrong))["next_fire_at"] is not None


async def test_invalid_schedules_are_planned_again_by_a_new_node(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """It may come with newer zone data."""
    made = await make_schedule(conn, timezone="Europe/Berlln")
    await planner.turn()
    await conn.execute("update rota.schedule_definitions set timezone = 'Europe/Berlin'")
    await conn.execute("update rota.schedule_clocks set next_fire_at = null, invalid_reason = 'old data'")
    await planner.turn()
    assert (await clock(conn, made))["next_fire_at"] is None
    await Planner(pool).turn()
    assert (await clock(conn, made))["next_fire_at"] is not None


async def test_next_fires_that_other_zone_data_found_are_found_anew(
    conn: Connection[Record], pool: asyncpg.Pool[Record], planner: Planner
) -> None:
    """Governments change the clocks. What was planned by the old rules, up to years ahead, would fire at the wrong hour."""
    yearly = await make_schedule(conn, "yearly", cron="0 9 1 6 *", timezone="Asia/Almaty")
    others = [
        await make_schedule(conn, "due", cron="0 9 1 6 *"),
        await make_schedule(conn, "paused", cron="0 9 1 6 *", paused=True),
        await make_schedule(conn, "beat", every=timedelta(days=300)),
        await make_schedule(conn, "right", cron="0 9 1 6 *"),
    ]
    await planner.turn()
    await make_due(conn, others[0])
    right = [(await clock(conn, made))["next_fire_at"] for made in (yearly, *others[1:])]
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
    assert [(await clock(conn, made))["next_fire_at"] for made in (yearly, *others[1:])] == right
    assert await dispositions(conn) == ["enqueued"], "what is due is decided about; nothing fires because of new data"
    assert [said["count"] for said in again.said("schedules.moved")] == [1]
    assert "2023c" not in await conn.fetchval("select planned_with from rota.meta")


async def test_while_others_plan_with_other_zone_data_it_is_not_settled(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """In the middle of an upgrade, what the last of the old ones plan is for the next of the new ones to correct."""
    await conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, tzdata, state) "
        "values (gen_random_uuid(), 'old', 1, '0.1', 'x', '{}', '{}', '{}', '2023c', 'running')"
    )
    await Planner(pool).turn()
    assert await conn.fetchval("select planned_with from rota.meta") is None
    await conn.execute("delete from rota.nodes")
    await Planner(pool).turn()
    assert await conn.fetchval("select planned_with from rota.meta") is not None


async def test_one_schedule_whose_job_is_refused_does_not_stop_the_others(
    conn: Connection[Record], planner: Planner
) -> None:
    """Nothing that is stored may make a batch fail for ever."""
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


# ── who looks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_node_looks_at_its_own_shards_and_takes_over_what_nobody_serves(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """The slice of a dead node is served two seconds late, by whoever sees it first."""
    made = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != made % 256])
    await make_due(conn, made, ago=SECOND)
    await elsewhere.turn()
    assert await fires(conn) == []
    await make_due(conn, made, ago=3 * SECOND)
    await elsewhere.turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_a_node_on_its_way_out_decides_nothing(conn: Connection[Record], pool: asyncpg.Pool[Record]) -> None:
    """It gives its shards up at once."""
    await make_due(conn, await make_schedule(conn), ago=HOUR)
    await Planner(pool, shards=None).turn()
    assert await fires(conn) == []


async def test_a_node_to_which_no_shard_fell_takes_over_what_nobody_serves(
    conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """Among hundreds of nodes, most of which have just died, the one that is left need not have any."""
    await make_due(conn, await make_schedule(conn), ago=3 * SECOND)
    await Planner(pool, shards=()).turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_news_of_nodes_has_everything_looked_at(conn: Connection[Record], pool: asyncpg.Pool[Record]) -> None:
    """Between a node's farewell and everybody's knowing of it nothing is late."""
    made = await make_schedule(conn)
    elsewhere = Planner(pool, shards=[shard for shard in EVERY_SHARD if shard != made % 256])
    await make_due(conn, made)
    elsewhere.scheduler.nodes_changed()
    await elsewhere.turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_a_machine_that_slept_during_a_look_looks_at_everything_soon(
    conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look rests ten times longer than it took: after a night's sleep in the middle of one, that was days."""
    real, slept = schedule_queries.take_due_schedules, [0.0]

    async def asleep_meanwhile(*args: Any, **kwargs: Any) -> schedule_queries.DueSchedulesResult:
        look = await real(*args, **kwargs)
        slept[0] += 8 * 3600
        return look

    monkeypatch.setattr(scheduler_module, "boottime", lambda: boottime() + slept[0])
    planner = Planner(pool)
    with monkeypatch.context() as night:
        night.setattr(schedule_queries, "take_due_schedules", asleep_meanwhile)
        await planner.turn()
    made = await make_schedule(conn)
    await make_due(conn, made, ago=8 * HOUR)
    slept[0] += scheduler_module.MAX_SWEEP_SECONDS
    await planner.scheduler.turn()
    assert await dispositions(conn) == ["enqueued"]


async def test_it_sleeps_until_the_very_next_instant(conn: Connection[Record], planner: Planner) -> None:
    """Lateness is milliseconds, and not a tick."""
    made = await make_schedule(conn)
    await planner.turn()
    await make_due(conn, made, ago=timedelta(milliseconds=-300))
    assert 0.1 < await planner.turn() <= 0.3
    await end_live_jobs(conn)
    await conn.execute("update rota.schedules set cron = null, every = '1 hour'")
    await make_due(conn, made, ago=-HOUR)
    assert await planner.turn() == 1.0


# ── how jobs ended ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_successes_and_failures_are_noted(conn: Connection[Record], pool: asyncpg.Pool[Record]) -> None:
    """A success ends the count of failures in a row."""
    one, other, gone = [await make_schedule(conn, name) for name in ("one", "other", "gone")]
    await conn.execute("delete from rota.schedules where name = 'gone'")
    record = ScheduleStats(pool, quiet_telemetry())
    for which, succeeded in ((one, False), (other, True), (one, False), (other, False), (gone, True)):
        record.add(which, succeeded=succeeded)
    await record.run_once()
    first, second = await clock(conn, one), await clock(conn, other)
    assert (first["last_success_at"], first["consecutive_failures"]) == (None, 2)
    assert (second["last_success_at"] is not None, second["consecutive_failures"]) == (True, 1)
    record.add(one, succeeded=True)
    await record.run_once()
    assert (await clock(conn, one))["consecutive_failures"] == 0


async def test_what_is_locked_is_noted_later(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record]
) -> None:
    """An editor's open transaction delays the note, and doesn't lose it."""
    made = await make_schedule(conn)
    record = ScheduleStats(pool, quiet_telemetry())
    record.add(made, succeeded=False)
    async with held(database, "update rota.schedules set paused = true"):
        await record.run_once()
    assert (await clock(conn, made))["consecutive_failures"] == 0
    await record.run_once()
    assert (await clock(conn, made))["consecutive_failures"] == 1


async def test_at_the_end_of_a_node_all_is_noted_that_nobody_holds_locked(
    database: Database, conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rest between the batches, and no wait for an editor's open transaction: the process is on its way out."""
    monkeypatch.setattr(track_record, "BATCH", 1)
    made = [await make_schedule(conn, name) for name in ("one", "other", "edited")]
    record = ScheduleStats(pool, quiet_telemetry())
    for which in made:
        record.add(which, succeeded=False)
    async with held(database, "update rota.schedules set paused = true where name = 'edited'"):
        await record.finish()
    assert [(await clock(conn, each))["consecutive_failures"] for each in made] == [1, 1, 0]
