"""Public failures of schedulers that must not happen here, by their ids: B26 to B41, B53, B61.

Decisions take `now` as an argument, so that most of these need no clock and no database.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from rota.app import App
from rota.config import load
from rota.daemon.daemon import Daemon
from rota.domain.schedule import Fire, Plan, Rule, plan
from schedule_rows import Planner, make_due, make_schedule, read_clock, read_dispositions, read_fires, utc
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection, Record

    from servers import Database

MINUTE = timedelta(minutes=1)


@pytest.fixture(name="pool")
async def open_pool(database: Database) -> AsyncIterator[asyncpg.Pool[Record]]:
    """What planners run on."""
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=10) as pool:
        yield pool


@asynccontextmanager
async def daemon(database: Database, app: App) -> AsyncIterator[Daemon]:
    """A whole node, in this process, drained at the end."""
    settings = {"database.url": database.dsn, "http.port": 0, "log.level": "error", "drain.timeout": "2s"}
    node = Daemon(load(None, settings, {}), app)
    async with asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await eventually(lambda: node.address)
        yield node
        node.shutdown.request_next()


def serving(handler: str) -> App:
    """An app with one handler, which does nothing."""
    app = App("x")

    async def nothing(job: Any) -> None:
        del job

    app.handler(handler)(nothing)
    return app


def seen(rule: Rule, since: datetime, nows: list[datetime]) -> list[Fire]:
    """The fires of a schedule that was last edited at `since`, and about which is decided at each of `nows`."""
    planned = plan(rule, now=since, next_fire_at=None, base=since)
    found: list[Fire] = []
    for now in nows:
        if planned.next_fire_at is None or planned.next_fire_at > now:
            continue
        planned = plan(rule, now=now, next_fire_at=planned.next_fire_at)
        found += planned.fires
    return found


def run(found: list[Fire]) -> list[datetime]:
    return [fire.scheduled_for for fire in found if fire.plan in {"enqueue", "enqueue_or_wait", "wait"}]


@pytest.mark.parametrize("seconds", [0, 1, 30, 59])
def test_b26_many_missed_instants_are_one_late_fire(seconds: int) -> None:
    """Every node down from 08:29 to 10:21."""
    back = utc(2026, 5, 5, 10, 21, seconds)
    found = seen(Rule(cron="* * * * *"), utc(2026, 5, 5, 8, 28, 30), [back, *(back + n * MINUTE for n in (1, 2, 3))])
    assert run(found)[0] in {utc(2026, 5, 5, 10, 20), utc(2026, 5, 5, 10, 21)}
    assert run(found)[1:] == [utc(2026, 5, 5, 10, minute) for minute in (22, 23, 24)]


def test_b26_catching_up_costs_the_same_for_one_as_for_a_million() -> None:
    """Two years of a schedule that fires each second."""
    rule = Rule(cron="* * * * * *", on_time_within=timedelta(milliseconds=1))
    started = time.perf_counter()
    planned = plan(rule, now=utc(2026, 5, 5), next_fire_at=utc(2024, 5, 5))
    assert time.perf_counter() - started < 1
    assert [fire.plan for fire in planned.fires] == ["skipped_misfire", "enqueue"]


def test_b28_one_late_fire_after_sleep() -> None:
    """Suspended from 08:43:00 to 08:47:33."""
    nows = [utc(2026, 5, 5, 8, 43), utc(2026, 5, 5, 8, 47, 33), utc(2026, 5, 5, 8, 48)]
    since = utc(2026, 5, 5, 8, 42, 30)
    assert run(seen(Rule(cron="* * * * *"), since, nows)) == [utc(2026, 5, 5, 8, m) for m in (43, 47, 48)]
    every = Rule(cron="* * * * *", misfire="all", catch_up_limit=10)
    assert run(seen(every, since, nows)) == [utc(2026, 5, 5, 8, m) for m in (43, 44, 45, 46, 47, 48)]


@pytest.mark.parametrize(("grace", "ran"), [(10, True), (1, False)])
def test_b29_a_deployment_at_the_very_minute(grace: int, ran: bool) -> None:
    """Stopped at 14:57, started at 15:03."""
    rule = Rule(cron="0 15 * * *", too_late_after=grace * MINUTE)
    planned = plan(rule, now=utc(2026, 5, 5, 15, 3), next_fire_at=utc(2026, 5, 5, 15))
    assert [fire.plan for fire in planned.fires] == ["enqueue" if ran else "skipped_misfire"]
    assert planned.next_fire_at == utc(2026, 5, 6, 15)


@pytest.mark.parametrize(
    ("edited", "cron", "following"),
    [
        (utc(2026, 5, 5, 12, 20), "0 16 * * *", utc(2026, 5, 5, 16)),
        (utc(2026, 5, 5, 11, 30), "25 11 * * *", utc(2026, 5, 6, 11, 25)),
    ],
)
def test_b31_nothing_fires_because_of_an_edit(edited: datetime, cron: str, following: datetime) -> None:
    """What comes next lies strictly after the edit."""
    planned = plan(Rule(cron=cron), now=edited + timedelta(seconds=1), next_fire_at=None, base=edited)
    assert planned == Plan(next_fire_at=following)


def test_b33_a_zone_behind_the_applications_fires_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """At nine in Los Angeles, wherever the process lives."""
    for here in ("Europe/Berlin", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", here)
        time.tzset()
        begin = utc(2026, 6, 1, 0, 0, 30)
        rule = Rule(cron="0 9 * * *", timezone="America/Los_Angeles")
        found = seen(rule, begin, [begin + n * MINUTE for n in range(24 * 60)])
        assert run(found) == [utc(2026, 6, 1, 16)]
    monkeypatch.undo()
    time.tzset()


async def test_b33_whatever_the_sessions_timezone_is(database: Database, conn: Connection[Record]) -> None:
    """The database's session must not shift it either."""
    await make_schedule(conn, cron="0 9 * * *", timezone="America/Los_Angeles")
    at = []
    for zone in ("Europe/Berlin", "Asia/Tokyo", "UTC"):
        await conn.execute("update rota.schedule_clocks set next_fire_at = '-infinity'")
        async with asyncpg.create_pool(database.dsn, min_size=1, server_settings={"timezone": zone}) as pool:
            await Planner(pool).turn()
        at.append(await conn.fetchval("select next_fire_at from rota.schedules"))
    assert len(set(at)) == 1
    assert at[0].minute == 0


def test_b35_zone_data_comes_with_us() -> None:
    """A container without zone files."""
    rule = Rule(cron="0 9 * * *", timezone="Europe/Berlin")
    assert plan(rule, now=utc(2026, 7, 1), next_fire_at=None, base=utc(2026, 7, 1)).next_fire_at == utc(2026, 7, 1, 7)


async def test_b37_any_node_fires_any_service_s_schedules(conn: Connection[Record], database: Database) -> None:
    """Only B's node is up: A's schedule fires all the same, and its job waits for a node that has the handler."""
    a = await make_schedule(conn, "a", handler="of_a")
    b = await make_schedule(conn, "b", handler="of_b")
    for each in (a, b):
        await make_due(conn, each)
    async with daemon(database, serving("of_b")):
        await eventually(lambda: conn.fetchval("select count(*) = 1 from rota.job_runs"))
        assert (await read_dispositions(conn, a), await read_dispositions(conn, b)) == (["enqueued"], ["enqueued"])
        assert await conn.fetchval("select handler from rota.jobs") == "of_a"
        await eventually(
            lambda: conn.fetchval("select last_success_at is not null from rota.schedules where name = 'b'")
        )


async def test_b39_eight_schedulers_an_hour_of_minutes(conn: Connection[Record], pool: asyncpg.Pool[Record]) -> None:
    """60 jobs and 60 distinct fires; the nodes' own clocks are never asked."""
    made = await make_schedule(conn, overlap="allow")
    planners = [Planner(pool) for _ in range(8)]
    for minute in range(60):
        await make_due(conn, made, ago=(60 - minute) * MINUTE)
        await asyncio.gather(*(planner.turn() for planner in planners))
    assert len(set(await read_fires(conn, made))) == 60
    assert await conn.fetchval("select count(*) from rota.jobs") == 60
    assert sum(told["decided"] for planner in planners for told in planner.events_named("fires.recorded")) == 60


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
async def test_b41_fires_are_unique_by_their_instant_and_not_by_time_elapsed(
    conn: Connection[Record], pool: asyncpg.Pool[Record], zone: str
) -> None:
    """The day of 23 hours has its run, too."""
    begin = utc(2026, 3, 27, 12)
    rule = Rule(cron="30 4 * * *", timezone=zone)
    found = run(seen(rule, begin, [begin + n * MINUTE for n in range(4 * 24 * 60)]))
    assert len(found) == 4
    made = await make_schedule(conn)
    for ago in (timedelta(hours=23, minutes=59, seconds=59.9), timedelta(0)):
        await make_due(conn, made, ago=ago)
        await Planner(pool).turn()
        await conn.execute("delete from rota.jobs")
    assert await read_dispositions(conn) == ["enqueued", "enqueued"]


async def test_b53_a_fire_held_back_while_its_turn_comes_runs_within_a_sweep(
    database: Database, conn: Connection[Record]
) -> None:
    """A's end finds nothing to release, and only then B commits as held back."""
    made = await make_schedule(conn, overlap="queue_one")
    async with daemon(database, serving("h")):
        await conn.execute(
            "insert into rota.fires (scheduled_for, schedule_id, name, disposition) values (now(), $1, 's', 'waiting')",
            made,
        )
        await eventually(lambda: conn.fetchval("select count(*) = 1 from rota.job_runs"), within=3)
    assert await read_dispositions(conn) == ["enqueued"]


async def test_b61_the_nodes_clock_decides_nothing(
    conn: Connection[Record], pool: asyncpg.Pool[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is an hour ahead fires nothing early, one that is behind nothing late."""
    early = await make_schedule(conn, "early")
    due = await make_schedule(conn, "due")
    await make_due(conn, early, ago=-timedelta(minutes=10))
    await make_due(conn, due)
    for offset in (3600, -600):
        monkeypatch.setattr(time, "time", lambda offset=offset: datetime.now(UTC).timestamp() + offset)
        await Planner(pool).turn()
    assert (await read_dispositions(conn, early), await read_dispositions(conn, due)) == ([], ["enqueued"])


async def test_b89_an_edit_by_sql_takes_effect_at_once(database: Database, conn: Connection[Record]) -> None:
    """Without a restart, and long before the next poll would see it."""
    async with daemon(database, serving("h")):
        made = await make_schedule(conn)
        await eventually(lambda: conn.fetchval("select next_fire_at is not null from rota.schedules"), within=3)
        await conn.execute("update rota.schedules set cron = null, every = '1 second'")
        await eventually(lambda: conn.fetchval("select count(*) > 0 from rota.job_runs"), within=4)
        await conn.execute("update rota.schedules set paused = true")
        assert (await read_clock(conn, made))["next_fire_at"] is None


async def test_b29_a_node_that_goes_hands_its_schedules_over_at_once(
    database: Database, conn: Connection[Record]
) -> None:
    """A rolling deployment: two nodes, one leaves; no instant is lost, none fires twice, none is late by the takeover."""
    for n in range(20):
        await make_schedule(conn, f"s{n}", cron=None, every=timedelta(seconds=1), overlap="allow")
    async with daemon(database, serving("h")):
        async with daemon(database, serving("h")):
            # Each of the two serves its part before one of them goes.
            await eventually(
                lambda: conn.fetchval(
                    "select count(*) = 2 and sum(cardinality(shards)) = 256 and min(cardinality(shards)) > 0 from rota.nodes"
                )
            )
            await eventually(lambda: conn.fetchval("select count(*) > 40 from rota.fires"))
        gone = await conn.fetchval("select now()")
        await eventually(
            lambda: conn.fetchval("select count(*) > 60 from rota.fires where scheduled_for > $1::timestamptz", gone)
        )
    counted = await conn.fetchrow(
        """
        select count(*) filter (where disposition <> 'enqueued') as skipped,
            count(distinct (schedule_id, scheduled_for)) = count(*) as distinct_fires,
            max(decided_at - scheduled_for) filter (where scheduled_for > $1::timestamptz - interval '1 s') as latest
        from rota.fires
        """,
        gone,
    )
    assert counted is not None
    assert (counted["skipped"], counted["distinct_fires"]) == (0, True)
    assert counted["latest"] < timedelta(seconds=1.5)
    missing = await conn.fetchval(
        """
        select count(*) from (
            select scheduled_for - lag(scheduled_for) over (partition by schedule_id order by scheduled_for) as step
            from rota.fires
        ) as steps where step <> interval '1 second'
        """
    )
    assert missing == 0
