"""Public failures of such systems, by their numbers, as far as the database alone decides them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from daemon_queries import (
    EPOCH,
    LEASE,
    claim,
    dump_all_tables,
    examine_unsettled,
    extend,
    lanes,
    reap,
    settle,
    settlement_row,
    sql,
    succeed,
)
from factories import (
    NODE,
    OTHER_NODE,
    make_attempts,
    make_dead_letter,
    make_dead_letters,
    make_handler,
    make_job,
    make_jobs,
    make_ledger_row,
    make_running_job,
    make_running_jobs,
    state_of,
    wait_until_blocked,
)
from query_plans import explain, prepare

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

HOUR = timedelta(hours=1)
LATE = timedelta(seconds=-1)


async def _refusal(conn: Connection[Record], statement: str, *arguments: Any) -> str:
    """The message with which it is refused."""
    with pytest.raises((asyncpg.PostgresError, asyncpg.DataError)) as refused:
        await conn.execute(statement, *arguments)
    return str(refused.value)


# ---------------------------------------------------------------------------------------------------------------------- B43

PLANNERS = [
    "",
    "set enable_hashjoin = off; set enable_mergejoin = off",
    "set enable_indexscan = off",
    "set enable_indexscan = off; set enable_bitmapscan = off",
    "set enable_nestloop = off",
    "set enable_material = off; set enable_memoize = off",
    "set plan_cache_mode = force_generic_plan",
    "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_tidscan = off",
]


async def test_b43_a_claim_never_takes_or_locks_more_than_was_asked_for(
    conn: Connection[Record], database: Database
) -> None:
    """Statistics of ten rows, 100,000 inserted since, and whatever join the planner is forced to: the limits hold."""
    await make_handler(conn)
    await make_handler(conn, "g")
    await conn.execute("alter table rota.jobs set (autovacuum_enabled = false)")
    await make_jobs(conn, 10)
    await conn.execute("analyze rota.jobs")
    await make_jobs(conn, 60_000, step=timedelta(microseconds=1))
    await make_jobs(conn, 20_000, handler="g", priority=3)
    await make_jobs(conn, 20_000, handler="g", queue="other", priority=3)
    where = [*lanes(group="shared"), *lanes("g", group="shared"), *lanes("g", "other", group="own")]
    asked: list[tuple[dict[str, int], int, int]] = [
        ({"shared": 1}, 1, 1),
        ({"shared": 7}, 7, 7),
        ({"shared": 7, "own": 5}, 12, 12),
        ({"shared": 7, "own": 5}, 100, 12),
        ({"shared": 7, "own": 5}, 3, 3),
        ({"nobody": 5}, 5, 0),
        ({"shared": 0}, 5, 0),
        ({"shared": 5}, 0, 0),
    ]
    for planner in PLANNERS:
        async with database.connect() as mine:
            await mine.execute(f"set jit = off; {planner}")
            for groups, total, expected in asked:
                attempt = mine.transaction()
                await attempt.start()
                got = await claim(mine, groups=groups, total=total, where=where)
                locked = await mine.fetchval(
                    "select count(*) from rota.jobs "
                    "where pg_current_xact_id()::xid in (jobs.xmin, jobs.xmax)"  # rewritten, or only locked
                )
                await attempt.rollback()
                assert len(got) == len({each.job_id for each in got}) == locked == expected, (planner, groups, total)
                in_each = Counter("own" if each.queue == "other" else "shared" for each in got)
                assert all(in_each[group] <= slots for group, slots in groups.items()), (planner, groups, total)


# ---------------------------------------------------------------------------------------------------------------------- B49


async def test_b49_a_redrive_of_ten_thousand_leaves_the_one_out_whose_key_is_taken(conn: Connection[Record]) -> None:
    """The others go back in one call; the one is named by its refusal and can be redriven once the key is free."""
    before = await make_dead_letters(conn, 5_000)
    blocked = await make_dead_letter(conn, unique_key="k")
    behind = await make_dead_letters(conn, 4_999)
    live, _ = await make_job(conn, unique_key="k")
    row = await conn.fetchrow("""select * from rota.redrive_many("limit" => 10000)""")
    assert row is not None
    assert (row["redriven"], row["left_out"]) == (len(before) + len(behind), 1)
    assert await conn.fetchval("select array_agg(job_id) from rota.dead_letters") == [blocked]
    assert f"live job {live} has its unique_key" in await _refusal(conn, "select rota.redrive($1)", blocked)
    await conn.execute("select rota.cancel($1)", live)
    await conn.execute("select rota.redrive($1)", blocked)
    assert await state_of(conn, blocked) == "due"


async def test_b49_a_reaper_of_many_writes_them_all_though_one_has_history_already(conn: Connection[Record]) -> None:
    """A sweep has no way to ask a person: what one row runs into must not keep the others from being taken back."""
    jobs = await make_running_jobs(conn, 1_000, lease=LATE, unique_key=None)
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome) values ($1, $2, 1, 'lost')", *jobs[500]
    )
    assert len(await reap(conn)) == 1_000
    assert await conn.fetchval("select count(*) from rota.jobs where state = 'scheduled'") == 1_000


# ---------------------------------------------------------------------------------------------------------------------- B51


async def test_b51_a_plain_insert_on_conflict_waits_for_the_other_and_then_inserts(
    conn: Connection[Record], database: Database
) -> None:
    """Never "already queued" by a transaction that then rolled back."""
    statement = "insert into rota.jobs (handler, unique_key) values ('h', 'k') on conflict do nothing returning job_id"
    async with database.connect() as other, database.connect() as watcher, asyncio.TaskGroup() as group:
        holder = other.transaction()
        await holder.start()
        assert await other.fetchval(statement) is not None
        waiting = group.create_task(conn.fetchval(statement))
        await wait_until_blocked(conn, watched_by=watcher)
        await holder.rollback()
        job_id = await waiting
    assert job_id is not None
    assert await state_of(conn, job_id) == "due"


@pytest.mark.parametrize("policy", ["keep", "replace", "error"])
async def test_b51_with_a_lock_timeout_the_caller_gets_an_error_instead_of_hanging(
    conn: Connection[Record], database: Database, policy: str
) -> None:
    """As long as the other transaction lives nobody can know; the caller's own bound is respected."""
    async with database.connect() as other:
        await other.execute("begin; select rota.enqueue('h', unique_key => 'k')")
        await conn.execute("set lock_timeout = '50ms'")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await conn.execute("select rota.enqueue('h', unique_key => 'k', on_conflict => $1)", policy)
        await other.execute("rollback")
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


# ---------------------------------------------------------------------------------------------------------------------- B53


async def test_b53_what_waits_for_a_key_finds_it_free_as_soon_as_its_holder_has_ended(
    conn: Connection[Record], database: Database
) -> None:
    """Held back by a live row and by nothing else: no counter, so nothing to release and nothing to miss."""
    holder = await make_running_job(conn, unique_key="k")
    letter = await make_dead_letter(conn, unique_key="k")
    async with database.connect() as settler, database.connect() as watcher, asyncio.TaskGroup() as group:
        settling = settler.transaction()
        await settling.start()
        assert await succeed(settler, holder) == [holder.fence_token]
        waiting = group.create_task(conn.execute("select rota.redrive($1)", letter))
        await wait_until_blocked(conn, watched_by=watcher)
        await settling.commit()
        await waiting
    assert await state_of(conn, letter) == "due"


async def test_b53_a_suspect_is_held_back_by_the_claim_alone_and_found_by_the_next_look(
    conn: Connection[Record],
) -> None:
    """Lost twice in a row it isn't claimed among the others, and it is when a dispatcher asks for suspects: one at a time."""
    await make_handler(conn)
    suspects = [(await make_job(conn, attempt=2, losses=2)).job_id for _ in range(2)]
    innocent, _ = await make_job(conn)
    assert [got.job_id for got in await claim(conn)] == [innocent]
    claims = [await claim(conn, total=1, suspects=True) for _ in range(3)]
    assert sorted(got.job_id for each in claims for got in each) == suspects
    assert [len(each) for each in claims] == [1, 1, 0]


# ---------------------------------------------------------------------------------------------------------------------- B55


async def test_b55_a_reaper_that_read_before_the_job_ended_writes_nothing(conn: Connection[Record]) -> None:
    """It writes by token, owner and expiry, not by id: what succeeded stays so, and a fresh attempt isn't disturbed."""
    await make_handler(conn)
    ended, again = await make_running_job(conn, lease=LATE), await make_running_job(conn, lease=LATE)
    read = [settlement_row(job, "bury", outcome="lost") for job in (ended, again)]
    await succeed(conn, ended)
    await settle(conn, settlement_row(again, delay=timedelta(0), outcome="lost"), expired_only=True)
    (fresh,) = await claim(conn, node=OTHER_NODE)
    before = await dump_all_tables(conn)
    assert await settle(conn, *read, expired_only=True) == {}
    assert await dump_all_tables(conn) == before
    assert [await state_of(conn, job.job_id) for job in (ended, again)] == ["succeeded", "running"]
    assert await succeed(conn, (fresh.job_id, fresh.fence_token), node=OTHER_NODE) == [fresh.fence_token]


# ---------------------------------------------------------------------------------------------------------------------- B57


async def test_b57_a_restarted_daemon_cannot_keep_its_predecessors_lease_alive(conn: Connection[Record]) -> None:
    """A lease belongs to an incarnation. Under the same host name, with the very token, the successor extends nothing."""
    job = await make_running_job(conn, lease=LATE, node=OTHER_NODE)
    for node in (OTHER_NODE, NODE):
        await conn.execute(
            "insert into rota.nodes (node_id, host, pid, rota_version, handlers, queues, slots) "
            "values ($1, 'worker-0', 1, '0', '{}', '{}', '{}')",
            node,
        )
    assert await extend(conn, job, node=NODE) == {}
    assert await conn.fetch(sql("find_orphaned_claims"), NODE, []) == []
    assert await reap(conn) == {job.fence_token: "retry"}
    assert await examine_unsettled(conn, job, node=OTHER_NODE) == {job.fence_token: "lost"}


# ---------------------------------------------------------------------------------------------------------------------- B71


async def test_b71_a_job_that_is_snoozed_and_fails_again_and_again_stays_small(conn: Connection[Record]) -> None:
    """History is kept apart, and the last 20 rows of it; the job's row is as long after 150 rounds as after the first."""
    await make_handler(conn, max_attempts=1000)
    job_id, _ = await make_job(conn, payload='{"n": 1}')
    sizes = set()
    for turn in range(150):
        (got,) = await claim(conn)
        held = (job_id, got.fence_token)
        snoozes = turn % 3 > 0
        row = settlement_row(
            held,
            "release" if snoozes else "retry",
            delay=timedelta(0),
            outcome="snoozed" if snoozes else "failed",
            error="x" * 8192,
        )
        assert len(await settle(conn, row)) == 1
        sizes.add(await conn.fetchval("select pg_column_size(jobs.*) from rota.jobs"))
    job = await conn.fetchrow("select attempt, releases from rota.jobs")
    assert job is not None
    assert tuple(job) == (50, 100)
    assert len(sizes) == 1
    kept = await conn.fetch("select fence_token from rota.attempts order by fence_token desc")
    assert len(kept) == 20
    assert kept[0][0] == got.fence_token


async def test_b71_an_error_text_of_megabytes_is_refused_by_the_table(conn: Connection[Record]) -> None:
    """The daemon cuts it; should it ever not, the row stays as small as it says it is."""
    job = await make_running_job(conn)
    with pytest.raises(asyncpg.CheckViolationError, match="error must be at most 8 KiB"):
        await settle(conn, settlement_row(job, error="x" * 5_000_000))
    assert await state_of(conn, job.job_id) == "running"


# ---------------------------------------------------------------------------------------------------------------------- B73


async def test_b73_dead_letters_are_counted_dated_and_kept_apart_from_finished_jobs(conn: Connection[Record]) -> None:
    """Their number and the age of the oldest are sampled; their retention is their own, and ends in the ledger."""
    await make_dead_letters(conn, 5, finished_at=-HOUR)
    await make_dead_letters(conn, 7)
    sample = {row["kind"]: row["value"] for row in await conn.fetch(sql("sample_backlog"), 100_000)}
    assert sample["dead"] == 12
    assert sample["oldest_dead"] == pytest.approx(3600, abs=60)
    await conn.fetch(sql("rotate_ledger"), timedelta(seconds=1))
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 12
    assert await conn.fetchval(sql("prune_dead_letters"), timedelta(minutes=1), 100) == 5
    assert await conn.fetchval("select count(*) from rota.job_runs where outcome = 'discarded'") == 5
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 7


async def test_b73_a_redrive_in_batches_is_spread_and_starves_no_live_work(conn: Connection[Record]) -> None:
    """20,000 letters go back over an hour: what is due now is claimed at once, and a claim costs what it did before."""
    await make_handler(conn)
    await prepare(conn, "claim_due_jobs")
    same = [["default"], ["default"], ["h"], [5], [EPOCH]]
    await make_jobs(conn, 50, run_at=LATE)
    await explain(conn, "claim_due_jobs", NODE, ["default"], [50], *same, 50, 0, LEASE, None, None, None)
    alone = (
        await explain(conn, "claim_due_jobs", NODE, ["default"], [50], *same, 50, 0, LEASE, None, None, None)
    ).buffers
    await make_dead_letters(conn, 20_000)
    for _ in range(2):
        row = await conn.fetchrow("""select * from rota.redrive_many("limit" => 10000, spread => '1 hour')""")
        assert row is not None
        assert row["redriven"] == 10_000
    due = await conn.fetchval("select count(*) from rota.jobs where run_at <= clock_timestamp() + interval '1 minute'")
    assert 50 <= due <= 50 + 400
    beside = await explain(conn, "claim_due_jobs", NODE, ["default"], [50], *same, 50, 0, LEASE, None, None, None)
    assert beside.buffers <= 2 * alone + 100
    assert {got.run_at < datetime.now(UTC) - timedelta(seconds=0.9) for got in await claim(conn, 40)} == {True}


# ---------------------------------------------------------------------------------------------------------------------- B87


@pytest.mark.parametrize(
    ("zone", "utc"),
    [("Europe/Berlin", "07:00"), ("UTC", "09:00"), ("Asia/Kathmandu", "03:15"), ("America/New_York", "13:00")],
)
async def test_b87_an_instant_without_a_zone_is_read_in_the_sessions_zone_and_shown(
    conn: Connection[Record], zone: str, utc: str
) -> None:
    """The column knows instants only; RETURNING shows which one was stored, and every way of inserting agrees."""
    await conn.execute(f"set timezone = '{zone}'")
    expected = datetime.fromisoformat(f"2026-07-01T{utc}:00+00:00")
    stored = await conn.fetchval(
        "insert into rota.jobs (handler, run_at) values ('h', '2026-07-01 09:00') returning run_at"
    )
    job_id = await conn.fetchval("select job_id from rota.enqueue('h', run_at => '2026-07-01 09:00')")
    options = json.dumps({"run_at": "2026-07-01 09:00"})
    other = await conn.fetchrow(sql("enqueue_job"), "h", None, options)
    assert other is not None
    rows = await conn.fetch("select run_at from rota.jobs where job_id = any ($1)", [job_id, other["job_id"]])
    assert {stored, *(row["run_at"] for row in rows)} == {expected}
    assert len(rows) == 2


async def test_b87_null_means_now_and_every_instant_is_one(conn: Connection[Record]) -> None:
    """No column of the schema holds a time without a zone, and infinity is no instant at which anything runs."""
    ours = await conn.fetchval("insert into rota.jobs (handler, run_at) values ('h', null) returning run_at = now()")
    assert ours is True
    naive = await conn.fetch(
        "select table_name, column_name from information_schema.columns "
        "where table_schema = 'rota' and data_type like '%without time zone%'"
    )
    assert naive == []
    for nonsense in ("infinity", "-infinity", "1969-12-31 23:59:59+00", "2200-01-01 00:00:00+00"):
        said = await _refusal(conn, f"insert into rota.jobs (handler, run_at) values ('h', '{nonsense}')")
        assert "must lie between the years 1970 and 2200" in said


# ---------------------------------------------------------------------------------------------------------------------- B89

ODD_NAMES = [
    "it's",
    'a"b',
    "{}",
    "%s",
    "$1",
    "\\",
    "\U0001f98a",
    "\u0645\u0631\u062d\u0628\u0627",
    "a b",
    "x" * 200,
    "e\u0301",
]

NO_NAMES = ["", "x" * 201, "x" * 300, "a\nb", "a\rb", "a\tb", "\u2028", "a\x7f", "\x1b[31m"]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_b89_a_name_that_can_be_read_comes_back_as_it_was(conn: Connection[Record], name: str) -> None:
    """Through insert, claim and ledger, byte for byte: names are data to every statement."""
    await make_handler(conn, name)
    job_id, _ = await make_job(conn, handler=name, queue=name, unique_key=name)
    (got,) = await claim(conn, groups={name: 1}, where=lanes(name, name))
    assert (got.job_id, got.handler, got.queue) == (job_id, name, name)
    await succeed(conn, (job_id, got.fence_token))
    run = await conn.fetchrow("select handler, queue, unique_key from rota.job_runs")
    assert run is not None
    assert tuple(run) == (name, name, name)


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("column", ["handler", "queue"])
async def test_b89_a_malformed_name_is_refused_in_words(conn: Connection[Record], column: str, name: str) -> None:
    """The constraint's own name is the message: it says what would be right."""
    columns = "handler" if column == "handler" else "queue, handler"
    values = "$1" if column == "handler" else "$1, 'h'"
    said = await _refusal(conn, f"insert into rota.jobs ({columns}) values ({values})", name)
    assert f"{column} must be a name of 1 to 200 characters on one line" in said


@pytest.mark.parametrize(
    ("payload", "back"),
    [
        ("null", "null"),
        ("[]", "[]"),
        ('"x"', '"x"'),
        ("7", "7"),
        ("1e400", "1" + "0" * 400),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"b": 1, "a": {}}', '{"a": {}, "b": 1}'),
        ('"\\" \\\\ \\n"', '"\\" \\\\ \\n"'),
        ('"\u202e\U0001f98a"', '"\u202e\U0001f98a"'),
    ],
)
async def test_b89_any_json_value_is_a_payload(conn: Connection[Record], payload: str, back: str) -> None:
    """Whatever jsonb takes is handed out as text, and no neighbour in the batch suffers from it."""
    await make_handler(conn)
    await conn.execute("insert into rota.jobs (handler, payload) values ('h', $1)", payload)
    await make_job(conn)
    assert {got.payload for got in await claim(conn)} == {back, "{}"}


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("priority", "10", "priority must lie between 0"),
        ("priority", "-1", "priority must lie between 0"),
        ("max_attempts", "0", "max_attempts must lie between 1 and 1000"),
        ("lease", "'1 s'", "lease must lie between 3 seconds and 1 day"),
        ("timeout", "'-1 s'", "timeout must be positive"),
        ("timeout", "'1 month'", "without months"),
        ("timeout", "'367 days'", "at most 366 days"),
        ("retry_for", "'0'", "retry_for must be positive"),
        ("delivery", "'exactly_once'", "delivery must be at_least_once or at_most_once"),
        ("unique_key", "''", "unique_key must have 1 to 500 characters"),
        ("idempotency_key", "'rota:x'", "idempotency_key must not begin with rota:"),
        ("meta", "'[]'", "meta must be an object"),
        ("meta", "jsonb_build_object('a', repeat('x', 70000))", "meta must be an object of at most 64 KiB"),
        ("payload", "to_jsonb(repeat('x', 1048577))", "payload must be at most 1 MiB"),
    ],
)
async def test_b89_a_value_out_of_bounds_is_refused_in_words(
    conn: Connection[Record], column: str, value: str, says: str
) -> None:
    """At the INSERT, where the author is, and not when a daemon trips over it."""
    assert says in await _refusal(conn, f"insert into rota.jobs (handler, {column}) values ('h', {value})")


async def test_b89_a_key_that_no_index_could_hold_is_refused_in_words(conn: Connection[Record]) -> None:
    """Handler and key lie in one index row, which has less room than both have within their own bounds."""
    handler, key = ("".join(chr(0x20000 + n * n * 7919 % 40_000) for n in range(length)) for length in (200, 451))
    insert = "insert into rota.jobs (handler, unique_key) values ($1, $2)"
    assert "handler and unique_key must have at most 2600 bytes together" in await _refusal(conn, insert, handler, key)
    await conn.execute(insert, handler, key[:-1])
    assert await conn.fetchval("select created from rota.enqueue($1, unique_key => $2)", handler, key[:-1]) is False


# ---------------------------------------------------------------------------------------------------------------------- B91


@pytest.mark.parametrize(
    "statement",
    [
        "insert into rota.jobs (handler, payload) values ('h', '{\"a\": \"\\u0000\"}')",
        "select rota.enqueue('h', '{\"a\": \"\\u0000\"}')",
        "insert into rota.jobs (handler, meta) values ('h', '{\"\\u0000\": 1}')",
    ],
)
async def test_b91_a_nul_in_a_payload_is_refused_at_the_insert(conn: Connection[Record], statement: str) -> None:
    """jsonb has no NUL: the author hears of it, and no job exists that can't be read."""
    assert "unsupported Unicode escape" in await _refusal(conn, statement)
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_b91_a_result_that_cannot_be_saved_leaves_its_job_to_be_settled_without_it(
    conn: Connection[Record],
) -> None:
    """The batch is refused whole, so that nothing is half written; without that result each of them can be settled."""
    jobs = await make_running_jobs(conn, 3)
    before = await dump_all_tables(conn)
    with pytest.raises(asyncpg.PostgresError):
        await succeed(conn, *jobs, results={jobs[1].fence_token: '"\\u0000"'})
    with pytest.raises(asyncpg.CheckViolationError, match="result must be at most 8 KiB"):
        await succeed(conn, *jobs, results={jobs[1].fence_token: json.dumps("x" * 9000)})
    assert await dump_all_tables(conn) == before
    assert await succeed(conn, *jobs) == [job.fence_token for job in jobs]


# ---------------------------------------------------------------------------------------------------------------------- B93


@pytest.mark.parametrize(
    "number", ["9007199254740993", "-9007199254740993", "123456789012345678901234567890", "0.1000000000000000055511"]
)
async def test_b93_numbers_stay_exact(conn: Connection[Record], number: str) -> None:
    """Through jsonb and back as text: nothing on the way knows of floating point."""
    await make_handler(conn)
    await conn.execute("insert into rota.jobs (handler, payload) values ('h', $1)", f'{{"n": {number}}}')
    (got,) = await claim(conn)
    assert got.payload == f'{{"n": {number}}}'


async def test_b93_the_largest_double_is_a_number_like_others(conn: Connection[Record]) -> None:
    """Written out in full, and the same when it is read."""
    await make_handler(conn)
    await conn.execute("insert into rota.jobs (handler, payload) values ('h', '{\"n\": 1e308}')")
    (got,) = await claim(conn)
    assert json.loads(got.payload or "", parse_int=float) == {"n": 1e308}


@pytest.mark.parametrize("nonsense", ["NaN", "Infinity", "-Infinity", '"\\ud83e"', '"\\udd8a\\ud83e"', "'x'", "{"])
async def test_b93_what_is_no_json_is_refused(conn: Connection[Record], nonsense: str) -> None:
    """NaN and lone surrogates are no JSON to the database, whichever language has written them."""
    with pytest.raises(asyncpg.DataError):
        await conn.execute("insert into rota.jobs (handler, payload) values ('h', $1)", nonsense)


async def test_b93_four_bytes_and_escapes_are_the_same_character(conn: Connection[Record]) -> None:
    """A pair of surrogates, or the character itself: one payload."""
    await make_handler(conn)
    for text in ('"\\ud83e\\udd8a"', '"\U0001f98a"'):
        await conn.execute("insert into rota.jobs (handler, payload) values ('h', $1)", text)
    assert {got.payload for got in await claim(conn)} == {'"\U0001f98a"'}


@pytest.mark.parametrize(("depth", "fits"), [(100, True), (101, False), (1000, False), (5000, False)])
async def test_b93_nesting_is_bounded(conn: Connection[Record], depth: int, *, fits: bool) -> None:
    """Deeper than any decoder is sure to go, a payload is refused where its author is."""
    insert = conn.execute("insert into rota.jobs (handler, payload) values ('h', $1)", "[" * depth + "1" + "]" * depth)
    if fits:
        await insert
    else:
        with pytest.raises(asyncpg.CheckViolationError, match="and at most 100 deep"):
            await insert


# ---------------------------------------------------------------------------------------------------------------------- B95


async def test_b95_pruning_goes_by_index_in_batches_and_comes_to_an_end(conn: Connection[Record]) -> None:
    """Each call costs by its batch and not by the table, stops at its limit, and the next goes on."""
    for each in range(10):
        await make_attempts(conn, 5_000, job_id=each + 1, finished_at=-HOUR * (each % 2))
    await make_dead_letters(conn, 5_000, finished_at=-HOUR)
    await conn.execute(
        "insert into rota.guards select 'g' || n, n, now() - interval '1 hour' from generate_series(1, 20000) as n"
    )
    await conn.execute("analyze")
    tables = {"attempts": 25_000, "dead_letters": 5_000, "guards": 20_000}
    await conn.execute("set statement_timeout = '5s'")
    for table, old in tables.items():
        query = f"prune_{table}"
        await prepare(conn, query)
        plan = await explain(conn, query, timedelta(minutes=1), 100)
        assert f"{query}_idx" in plan.indexes
        assert table not in plan.sequentially_scanned
        assert plan.buffers < 100 * 40
        assert [await conn.fetchval(sql(query), timedelta(minutes=1), 20_000) for _ in range(3)] == [
            min(old, 20_000), max(0, old - 20_000), 0,
        ]  # fmt: skip
    assert await conn.fetchval("select count(*) from rota.attempts") == 25_000


async def test_b95_finished_jobs_go_by_the_day_without_a_scan(conn: Connection[Record]) -> None:
    """A partition whose last row is too old is dropped; the others are not looked into."""
    day = await conn.fetchval("select (now() at time zone 'utc')::date - 9")
    name = f"job_runs_{day:%Y%m%d}"
    await conn.execute(
        f"create table rota.{name} partition of rota.job_runs "
        f"for values from ('{day} 00:00+00') to ('{day + timedelta(days=1)} 00:00+00')"
    )
    row = await conn.fetchrow(sql("rotate_ledger"), timedelta(days=7))
    assert row is not None
    assert (row["made"], row["dropped"]) == (0, 1)
    row = await conn.fetchrow(sql("rotate_ledger"), timedelta(days=7))
    assert row is not None
    assert (row["made"], row["dropped"]) == (0, 0)


async def test_b95_jobs_that_ended_while_nobody_rotated_go_to_their_day_and_in_their_time(
    conn: Connection[Record],
) -> None:
    """Without this, one row in the default partition would keep the whole day's ledger there, and for ever."""
    today = await conn.fetchval("select to_char(now() at time zone 'utc', 'YYYYMMDD')")
    await conn.execute(f"drop table rota.job_runs_{today}")
    recent, _ = await make_ledger_row(conn)
    forgotten, _ = await make_ledger_row(conn, finished_at=timedelta(days=-20))
    assert await conn.fetchval("select count(*) from rota.job_runs_default") == 2
    row = await conn.fetchrow(sql("rotate_ledger"), timedelta(days=7))
    assert row is not None
    assert tuple(row) == (1, 0)
    assert await conn.fetchval("select count(*) from rota.job_runs_default") == 0
    assert await conn.fetchval(f"select array_agg(job_id) from rota.job_runs_{today}") == [recent]
    assert await state_of(conn, forgotten) is None


async def test_b95_keep_zero_is_for_ever(conn: Connection[Record]) -> None:
    """Nobody's ledger is dropped because a setting was left out."""
    await conn.execute(
        "create table rota.job_runs_20200101 partition of rota.job_runs "
        "for values from ('2020-01-01 00:00+00') to ('2020-01-02 00:00+00')"
    )
    row = await conn.fetchrow(sql("rotate_ledger"), timedelta(0))
    assert row is not None
    assert row["dropped"] == 0


@pytest.mark.parametrize("style", ["ISO, DMY", "SQL, YMD", "Postgres, YMD", "German, MDY"])
async def test_b95_days_are_days_in_whatever_style_they_are_written(conn: Connection[Record], style: str) -> None:
    """Set for the whole database, it would leave every day's ledger in the default partition, and a service failing."""
    await conn.execute("set timezone = 'Pacific/Kiritimati'")
    await conn.execute(f"set datestyle = '{style}'")
    await conn.execute("select rota.rotate_ledger(ahead => 40)")
    await conn.execute("set datestyle = 'ISO'; set timezone = 'UTC'")
    days = await conn.fetchval(
        "select count(*) from pg_class where relkind = 'r' and relispartition "
        "and relname in (select 'job_runs_' || to_char(now() + n * interval '1 day', 'YYYYMMDD') from generate_series(0, 40) as n)"
    )
    assert days == 41


async def test_b95_no_table_refers_to_another(conn: Connection[Record]) -> None:
    """A foreign key would make every prune, and every start, look into the other table."""
    keys = await conn.fetch(
        "select conname from pg_constraint where contype = 'f' and connamespace = 'rota'::regnamespace"
    )
    assert keys == []
