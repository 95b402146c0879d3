"""What is said of schedules and decided about them costs by what is due or asked for, not by what is stored.

Two grounds, planned in three ways each, as in test_plans: `large` is analysed with what is due; `surprised` was analysed when
nothing was due and no fire was kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from query_plans import Plan, explain, prepare
from rota.db.schedule_queries import DISTANT_PAST, NO_FLOOR
from rota.db.schedule_reports import MAX_MANUAL_FIRES
from rota.db.sessions import Route, own_session_settings
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncpg import Connection, Record

    from servers import Database, Databases

SCHEDULES = 60_000
LIMIT = 1000
DAYS = 30
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
LARGE_TABLES = {"schedule_definitions", "schedule_clocks", "fires", "jobs", "job_runs"}

PLANT = """
insert into rota.schedules (name, handler, cron, payload)
select 's' || n, 'h', format('0 0 %s %s *', 1 + n % 25, 1 + n % 11), jsonb_build_object('fill', repeat('x', 200))
from generate_series(1, $1::int8) as n
"""
SLEEP = "update rota.schedule_clocks set next_fire_at = now() + interval '1 day' * (1 + schedule_id % 300)"
FALL_DUE = """
update rota.schedule_clocks set next_fire_at = date_trunc('second', now()) - interval '1 s', last_fire_at = null
where schedule_id % 2 = 0
"""
# Every tenth one fired at noon of each day.
REMEMBER = """
insert into rota.fires (scheduled_for, decided_at, schedule_id, name, disposition, job_id)
select $1::timestamptz - day * interval '24 hours', $1::timestamptz - day * interval '24 hours', n, 's' || n, 'enqueued', -n
from generate_series(0, $2::int4 - 1) as day, generate_series(9, $3::int8, 10) as n
"""
LIVE = """
insert into rota.jobs (handler, schedule_id, exclusive, run_at)
select 'h', case when n % 15 = 1 then n / 5 end, n % 15 = 1, now() + interval '1 day' from generate_series(1, $1::int8 ) as n
"""
ASKED = "insert into rota.cancel_requests (job_id, requested_by) select -n, 'somebody' from generate_series(1, $1::int8) as n"


def _look(*, sweeps: bool) -> list[Any]:
    floor = NO_FLOOR if sweeps else (datetime.now(UTC) - timedelta(seconds=10), -1, -1)
    return [list(range(256)), timedelta(seconds=2), 7, *floor, LIMIT, timedelta(seconds=1)]


def _few_shards() -> list[Any]:
    return [list(range(100)), timedelta(seconds=0), 7, *NO_FLOOR, LIMIT, timedelta(seconds=1)]


def _record(instant: datetime) -> list[Any]:
    """Decide about a thousand as they are, in fifty ways."""
    ids = list(range(2, 2 * LIMIT + 1, 2))
    ways = 50
    following = [instant + timedelta(days=100 + n) for n in range(ways)]
    positions = list(range(1, ways + 1))
    return [
        ids, [1] * LIMIT, [1 + n % ways for n in range(LIMIT)], [instant] * ways, following, [instant] * ways, positions,
        positions, [instant] * ways, ["enqueue"] * ways, [DISTANT_PAST] * ways, [0] * ways, [None] * ways,
    ]  # fmt: skip


def _ended() -> list[Any]:
    return [list(range(1, LIMIT + 1)), [True] * LIMIT, [0] * LIMIT]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement under test: what it is given, and at most how many pages it may look at for each row it deals with."""

    query: str
    arguments: Callable[[datetime], list[Any]]
    rows: int
    pages_a_row: int = 12
    ways: tuple[str, ...] = ("pooled", "direct", "early")


READ = ("pooled",)
"""What commands ask is planned for the table as it is: they come as if through a pooler."""

STATEMENTS = {
    "sweep": Statement("take_due_schedules", lambda _: _look(sweeps=True), LIMIT),
    "look": Statement("take_due_schedules", lambda _: _look(sweeps=False), LIMIT),
    # Of the ten thousand longest overdue that are looked at, a thousand are taken.
    "overdue": Statement("take_due_schedules", lambda _: _few_shards(), LIMIT * 2, pages_a_row=20),
    "record": Statement("record_fires", _record, LIMIT, pages_a_row=80),
    "note": Statement("note_fire_outcomes", lambda _: _ended(), LIMIT, pages_a_row=25),
    "promote": Statement("promote_waiting_fires", lambda _: [LIMIT, None], 1),
    "replace": Statement("replace_live_jobs", lambda _: [LIMIT, None], 1),
    "prune": Statement("prune_fires", lambda _: [timedelta(days=10), LIMIT], LIMIT),
    "count": Statement("summarise_schedules", lambda _: [], SCHEDULES, pages_a_row=5),
    "watched": Statement("sample_schedules", lambda _: [100], 1),
    "list fires": Statement("list_fires", lambda _: [SCHEDULES - 1, 10], DAYS, ways=READ),
    "list all fires": Statement("list_fires", lambda _: [SCHEDULES - 1, 10_000], DAYS, ways=READ),
    "list no fires": Statement("list_fires", lambda _: [SCHEDULES, 10], DAYS, ways=READ),
    "find fire": Statement(
        "find_fire", lambda _: [SCHEDULES - 1, NOON - timedelta(days=20), MAX_MANUAL_FIRES], 1, ways=READ
    ),
    "find no fire": Statement(
        "find_fire", lambda _: [SCHEDULES - 1, NOON - timedelta(days=20.5), MAX_MANUAL_FIRES], DAYS, ways=READ
    ),
    "find job's fire": Statement("find_job_fire", lambda _: [-9, 9, NOON], 1, ways=READ),
    "find removed": Statement("find_removed_schedule", lambda _: ["s9", LIMIT], LIMIT, pages_a_row=2, ways=READ),
    "describe": Statement("describe_schedule", lambda _: [f"s{SCHEDULES}"], 8, ways=READ),
    "next fires": Statement("list_next_fires", lambda _: [100], 100, ways=READ),
    "list": Statement("list_schedules", lambda _: [None, None, None, None, 100], 100, pages_a_row=50, ways=READ),
    **{
        f"list {state}": Statement(
            "list_odd_schedules",
            lambda _, state=state: [None, state, None, None, 100],  # type: ignore[misc]
            1,
            ways=READ,
        )
        for state in ("paused", "ended", "silent")
    },
    "names": Statement("list_schedule_names", lambda _: [100], 100, ways=READ),
    "crowd": Statement(
        "count_crowd", lambda instant: [instant + timedelta(days=7), "* * * * *", "UTC"], LIMIT, ways=READ
    ),
}


@dataclass(slots=True)
class Ground:
    """A seeded database, and one connection to it for each way to plan."""

    run: Callable[..., Any]
    database: Database
    instant: datetime
    ways: dict[str, Connection[Record]]

    async def connect(self, way: str) -> None:
        """Open the connection on which all statements are planned in that way, and plan them."""
        settings = own_session_settings(Route(pooled=way == "pooled", version=180000, synchronous_commit="on"), "plans")
        if way == "pooled":
            settings["plan_cache_mode"] = "force_custom_plan"
        conn = await asyncpg.connect(self.database.dsn, server_settings=settings)
        self.ways[way] = conn
        for query in {statement.query for statement in STATEMENTS.values()}:
            await prepare(conn, query)
        for statement in STATEMENTS.values() if way == "early" else ():
            await explain(conn, statement.query, *statement.arguments(self.instant))

    def explain(self, name: str, way: str) -> Plan:
        """Carry the statement out."""
        statement = STATEMENTS[name]
        plan: Plan = self.run(explain(self.ways[way], statement.query, *statement.arguments(self.instant)))
        return plan


@pytest.fixture(scope="module")
def grounds(databases: Databases) -> Iterator[dict[str, Ground]]:
    """large: analysed as it is. surprised: analysed when nothing was due and nothing had fired."""
    run = databases._run
    made = {name: Ground(run, databases.clone(), NOON, {}) for name in ("large", "surprised")}

    async def plant(ground: Ground, *, surprised: bool) -> None:
        async with ground.database.connect() as conn:
            for table in ("schedule_definitions", "schedule_clocks", "fires", "jobs"):
                await conn.execute(f"alter table rota.{table} set (autovacuum_enabled = false)")
            await conn.execute("insert into rota.handlers (handler, app) values ('h', 'a')")
            await conn.execute(PLANT, SCHEDULES)
            await conn.execute(SLEEP)
            await conn.execute("vacuum analyze")
            if surprised:
                await ground.connect("early")
            await conn.execute(FALL_DUE)
            await conn.execute(REMEMBER, NOON, DAYS, SCHEDULES)
            await conn.execute(LIVE, SCHEDULES)
            await conn.execute(ASKED, LIMIT)
            if not surprised:
                await conn.execute("vacuum analyze")
            ground.instant = await conn.fetchval("select min(next_fire_at) from rota.schedule_clocks")
            for way in ("pooled", "direct"):
                await ground.connect(way)

    for name, ground in made.items():
        run(plant(ground, surprised=name == "surprised"))
    yield made
    for ground in made.values():
        for conn in ground.ways.values():
            conn.terminate()
        databases.drop(ground.database)


CASES = [
    (ground, way, name)
    for ground, way in (*product(("large", "surprised"), ("pooled", "direct")), ("surprised", "early"))
    for name, statement in STATEMENTS.items()
    if way in statement.ways
]


@pytest.mark.parametrize(("ground", "way", "name"), CASES)
def test_schedules_cost_by_what_is_due_or_asked_for(
    grounds: dict[str, Ground], ground: str, way: str, name: str
) -> None:
    """Neither a table read from end to end, nor everything that is due sorted for the thousand that are taken."""
    plan, statement = grounds[ground].explain(name, way), STATEMENTS[name]
    assert plan.buffers <= 300 + statement.rows * statement.pages_a_row
    assert plan.most_rows_filtered <= 10 * LIMIT
    assert plan.most_rows_sorted <= 10 * LIMIT
    if way == "pooled" and not (ground == "large" and statement.ways is READ):
        return  # as cheap as this, any way will do: no plan is kept for a table that grows
    assert not plan.sequentially_scanned & LARGE_TABLES
    for line in re.findall(r"^-- index: (.*)$", SQL[statement.query], re.MULTILINE):
        for index in re.findall(r"\w+_(?:idx|pkey)", line):
            assert index in plan.indexes, f"{index} isn't among {plan.indexes}"
