"""The hot statements stay on their indexes, whatever the statistics say, and cost by what they do, not by what lies beside.

A queue's statistics are always wrong: the table was empty when they were taken, or full. So each statement is planned on
several grounds, and in three ways: pooled, where nothing stays prepared and each call is planned for its arguments; direct,
with the generic plan that a daemon's own connection soon uses; and early, with a generic plan from when the table was small,
which nothing has invalidated since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from daemon_queries import EPOCH, GRACE, LEASE, settlement_row
from factories import (
    NODE,
    OTHER_NODE,
    make_attempts,
    make_dead_letters,
    make_handler,
    make_jobs,
    make_ledger_rows,
    make_running_jobs,
)
from query_plans import Plan, explain, prepare
from rota.db.sessions import Route, own_session_settings
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from asyncpg import Connection, Record

    from factories import RunningJob
    from servers import Database, Databases

LONG_AGO = timedelta(days=-400)
MANY = 100_000
BATCH = 500

LARGE_TABLES = re.compile(r"jobs|job_runs.*|attempts|dead_letters|guards")


@dataclass(slots=True)
class Ground:
    """A seeded database, and one connection to it for each way to plan."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    database: Database
    mine: list[RunningJob] = field(default_factory=list)
    expired: list[RunningJob] = field(default_factory=list)
    ways: dict[str, Connection[Record]] = field(default_factory=dict)

    async def connect(self, way: str) -> None:
        """Open the connection on which all statements are planned in that way, and plan them."""
        route = Route(pooled=way == "pooled", version=180000, synchronous_commit="on")
        settings = own_session_settings(route, "plans")
        if route.pooled:
            settings["plan_cache_mode"] = "force_custom_plan"
        else:
            assert settings["plan_cache_mode"] == "force_generic_plan"
        conn = await asyncpg.connect(self.database.dsn, server_settings=settings)
        self.ways[way] = conn
        for query in {statement.query: statement for statement in STATEMENTS.values()}:
            await prepare(conn, query)
        for statement in STATEMENTS.values() if way == "early" else ():
            await explain(conn, statement.query, *statement.arguments(self))

    def explain(self, name: str, way: str) -> Plan:
        """Carry the statement out."""
        statement = STATEMENTS[name]
        plan: Plan = self.run(explain(self.ways[way], statement.query, *statement.arguments(self)))
        return plan

    def leave(self) -> None:
        """Close what is open."""
        for conn in self.ways.values():
            conn.terminate()


def _fenced(jobs: Sequence[RunningJob]) -> list[list[int]]:
    return [[job.job_id for job in jobs], [job.fence_token for job in jobs]]


def _claim(_: Ground, slots: int = 100) -> list[Any]:
    priorities = list(range(10))
    same = [["default"] * 10, ["default"] * 10, ["h"] * 10, priorities, [EPOCH] * 10]
    return [NODE, ["default"], [slots], *same, slots, 0, LEASE, ["default"], None, None]


def _succeeded(ground: Ground) -> list[Any]:
    job_ids, tokens = _fenced(ground.mine)
    return [NODE, job_ids, tokens, tokens, ['{"rows": 3}'] * len(job_ids)]


def _unfinished(ground: Ground) -> list[Any]:
    ways = ("retry", "bury", "release", "cancel")
    rows = [settlement_row(job, ways[n % 4]) for n, job in enumerate(ground.mine)]
    return [*map(list, zip(*rows, strict=True)), False, None]


def _reaped(ground: Ground) -> list[Any]:
    rows = [settlement_row(job, node=OTHER_NODE, outcome="lost") for job in ground.expired]
    return [*map(list, zip(*rows, strict=True)), True, None]


def _examined(ground: Ground) -> list[Any]:
    job_ids, tokens = _fenced(ground.mine)
    return [NODE, job_ids, [token + n % 2 * 10**9 for n, token in enumerate(tokens)]]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement under test: what it is given, and at most how many pages it may look at for each row it deals with."""

    query: str
    arguments: Callable[[Ground], list[Any]]
    rows: int
    pages_a_row: int = 40


STATEMENTS = {
    "claim": Statement("claim_due_jobs", _claim, 100),
    "extend": Statement("extend_leases", lambda ground: [NODE, *_fenced(ground.mine), GRACE], BATCH),
    "succeed": Statement("settle_succeeded", _succeeded, BATCH),
    "settle": Statement("settle_unfinished", _unfinished, BATCH, pages_a_row=80),
    "reap": Statement("settle_unfinished", _reaped, BATCH, pages_a_row=80),
    "find expired": Statement("find_expired_leases", lambda _: [0, BATCH], BATCH),
    "find orphaned": Statement("find_orphaned_claims", lambda _: [NODE, []], BATCH),
    "load terms": Statement("load_terms", lambda ground: [NODE, *_fenced(ground.mine)], BATCH),
    "examine": Statement("examine_unsettled", _examined, BATCH),
    "expire": Statement("expire_unstarted_jobs", lambda _: [BATCH, None], BATCH),
    "answer requests": Statement("answer_cancel_requests", lambda _: [BATCH, None], BATCH),
    "summarise": Statement("summarise_live_jobs", lambda _: [100, 1000, 100], 30),
    "count ahead": Statement(
        "count_jobs_ahead", lambda _: ["default", ["h", "x"], 5, datetime.now(UTC), 0, BATCH], BATCH
    ),
    "count running": Statement("count_running_jobs", lambda _: [], 2 * BATCH),
    "list queues": Statement("list_queues", lambda _: ["", 200, ["h"]], 10),
    "checkpoint": Statement("save_checkpoint", lambda ground: [NODE, *ground.mine[0], "[1]"], 1),
    "progress": Statement("report_progress", lambda ground: [NODE, *ground.mine[0], 0.5, "half"], 1),
    "prune attempts": Statement("prune_attempts", lambda _: [timedelta(days=30), BATCH], BATCH),
    "prune letters": Statement("prune_dead_letters", lambda _: [timedelta(days=90), BATCH], BATCH),
    "prune guards": Statement("prune_guards", lambda _: [timedelta(days=30), BATCH], BATCH),
}


async def _plant(conn: Connection[Record], ground: Ground, size: int, batch: int) -> None:
    """The work at hand, a batch of each kind, and `size` rows of everything else beside it."""
    await make_handler(conn)
    await make_jobs(conn, size, handler="foreign")
    await make_jobs(conn, size, run_at=timedelta(days=1))
    for priority in (2, 5, 7):
        await make_jobs(conn, batch, step=timedelta(milliseconds=1), priority=priority)
    await make_jobs(conn, batch, handler="foreign", start_by=timedelta(seconds=-1))
    asked = await make_jobs(conn, 10, run_at=timedelta(days=2))
    ground.mine = await make_running_jobs(conn, batch, run_at=timedelta(hours=-1))
    ground.expired = await make_running_jobs(conn, batch, lease=timedelta(minutes=-1), node=OTHER_NODE)
    await make_ledger_rows(conn, size // 2)
    await make_ledger_rows(conn, size // 4, finished_at=timedelta(days=-5))
    for each in range(10):
        await make_attempts(conn, size // 20, finished_at=LONG_AGO, job_id=-each)
    for job in ground.mine[:3]:
        await make_attempts(conn, 30, job_id=job.job_id)
        await conn.execute("update rota.jobs set attempt = 30 where job_id = $1", job.job_id)
    await make_dead_letters(conn, size // 5, finished_at=LONG_AGO)
    await conn.execute(
        "insert into rota.guards select 'order:' || n, n, now() + $2 from generate_series(1, $1::int) as n "
        "on conflict do nothing",
        size // 2,
        LONG_AGO,
    )
    waiting = [job.job_id for job in asked]
    await conn.execute(
        "insert into rota.cancel_requests (job_id, requested_by) select unnest($1::int8[]), 'someone'", waiting
    )


async def _still(conn: Connection[Record]) -> None:
    """Without this, autovacuum would put the statistics right in the middle of a test, or not."""
    for table in ("jobs", "attempts", "dead_letters", "guards", "cancel_requests", "handlers"):
        await conn.execute(f"alter table rota.{table} set (autovacuum_enabled = false)")
    for partition in await conn.fetch(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'rota.job_runs'::regclass"
    ):
        await conn.execute(f"alter table {partition[0]} set (autovacuum_enabled = false)")
    await conn.execute(
        "alter table rota.jobs disable trigger user; alter table rota.jobs alter queue set default 'default'"
    )
    await conn.execute(
        "alter table rota.jobs alter priority set default 5, alter payload set default '{}', "
        "alter created_by set default 'me', alter scheduled_for set default now()"
    )


@pytest.fixture(scope="module")
def grounds(databases: Databases) -> Iterator[dict[str, Ground]]:
    """large: analysed. outgrown: analysed when small, then filled. emptied: analysed when full, then emptied."""
    run = databases._run
    made = {name: Ground(run, databases.clone()) for name in ("large", "outgrown")}

    async def prepare_large(ground: Ground) -> None:
        async with ground.database.connect() as conn:
            await _still(conn)
            await _plant(conn, ground, MANY, BATCH)
            await conn.execute("analyze")

    async def prepare_outgrown(ground: Ground) -> None:
        async with ground.database.connect() as conn:
            await _still(conn)
            await _plant(conn, ground, 10, 2)
            await conn.execute("analyze")
            await ground.connect("early")
            await _plant(conn, ground, MANY, BATCH)

    async def empty(ground: Ground) -> None:
        async with ground.database.connect() as conn:
            await conn.execute("delete from rota.jobs where handler = 'foreign' and start_by is null or run_at > now()")
            for table in ("job_runs", "attempts", "dead_letters", "guards"):
                await conn.execute(f"delete from rota.{table}")

    run(prepare_large(made["large"]))
    run(prepare_outgrown(made["outgrown"]))
    like_large = databases.clone(of=made["large"].database)
    made["emptied"] = Ground(run, like_large, made["large"].mine, made["large"].expired)
    run(empty(made["emptied"]))
    for ground in made.values():
        for way in ("pooled", "direct"):
            run(ground.connect(way))
    yield made
    for ground in made.values():
        ground.leave()
        databases.drop(ground.database)


CASES = [*product(("large", "outgrown", "emptied"), ("pooled", "direct")), ("outgrown", "early")]


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize(("ground", "way"), CASES)
def test_hot_statements_stay_on_their_indexes(grounds: dict[str, Ground], ground: str, way: str, name: str) -> None:
    """A plan that reads a table from end to end is cheap on the day it is made, and an outage when the table has grown."""
    plan = grounds[ground].explain(name, way)
    assert not [table for table in plan.sequentially_scanned if LARGE_TABLES.fullmatch(table)]
    for line in re.findall(r"^-- index: (.*)$", SQL[STATEMENTS[name].query], re.MULTILINE):
        for index in re.findall(r"\w+_(?:idx|pkey)", line):
            of_a_partition = re.compile(index.replace("job_runs_", r"job_runs_(\w+_)?"))
            assert any(of_a_partition.fullmatch(used) for used in plan.indexes), f"{index} isn't among {plan.indexes}"


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize(("ground", "way"), [case for case in CASES if case[0] != "emptied"])
def test_hot_statements_cost_by_what_they_do(grounds: dict[str, Ground], ground: str, way: str, name: str) -> None:
    """Neither pages nor rows looked at in vain (a join of all with all is no page, and yet the whole second)."""
    plan, statement = grounds[ground].explain(name, way), STATEMENTS[name]
    assert plan.buffers <= 300 + statement.rows * statement.pages_a_row
    assert plan.most_rows_filtered <= 20 * BATCH


@pytest.mark.parametrize(("ground", "way"), CASES)
def test_a_claim_sorts_no_lane(grounds: dict[str, Ground], ground: str, way: str) -> None:
    """The index gives the order; a sort would read every due job of the lane for each slot."""
    assert "jobs" not in grounds[ground].explain("claim", way).sorted_tables


def test_a_claim_costs_the_same_whatever_lies_beside_it(databases: Databases) -> None:
    """B73, and the queue that is another app's: due jobs of foreign handlers, future ones and dead letters are not stepped over."""
    database = databases.clone()

    async def measure() -> dict[str, int]:
        async with database.connect() as conn:
            await _still(conn)
            await make_handler(conn)
            await prepare(conn, "claim_due_jobs")
            ground = Ground(databases._run, database)
            found = {}

            async def look(what: str) -> None:
                await make_jobs(conn, 100, run_at=timedelta(seconds=-1))
                await conn.execute("vacuum analyze rota.jobs")
                await explain(conn, "claim_due_jobs", *_claim(ground))
                found[what] = (await explain(conn, "claim_due_jobs", *_claim(ground))).buffers

            await look("alone")
            await make_jobs(conn, 200_000, handler="foreign")
            await look("foreign")
            await make_jobs(conn, 200_000, run_at=timedelta(days=1))
            await look("future")
            await make_dead_letters(conn, 100_000)
            await look("dead letters")
            return found

    try:
        found = databases._run(measure())
    finally:
        databases.drop(database)
    assert max(found.values()) <= found["alone"] * 1.3 + 60, found
