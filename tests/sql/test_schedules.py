"""rota.schedules by plain SQL: what is refused, what an edit leaves behind, and what the functions around it do."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import wait_until_blocked
from rota.cron import Cron, InvalidCron
from rota.db.sql import MIGRATIONS
from schedule_rows import make_due, make_schedule, read_clock, read_dispositions, read_fires

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

REFUSED = asyncpg.CheckViolationError


# ── what is stored, and what is refused ───────────────────────────────────────────────────────────────────────────────


async def test_null_means_the_default(conn: Connection[Record]) -> None:
    """ORMs send every column, with NULL for what nobody set."""
    await conn.execute(
        """
        insert into rota.schedules (name, handler, cron, timezone, payload, priority, paused, misfire, on_time_within,
            catch_up_limit, overlap, dst_gap, dst_fold, jitter, created_by, created_at)
        values ('s', 'h', '@daily', null, null, null, null, null, null, null, null, null, null, null, null, null)
        """
    )
    row = await conn.fetchrow("select *, now() - created_at < '1 minute' as fresh from rota.schedules")
    assert row is not None
    assert [row[name] for name in ("timezone", "payload", "priority", "paused", "misfire", "overlap")] == [
        "UTC",
        "{}",
        5,
        False,
        "latest",
        "skip",
    ]
    assert (row["on_time_within"], row["catch_up_limit"], row["jitter"]) == (timedelta(seconds=60), 100, timedelta(0))
    assert row["created_by"] == await conn.fetchval("select session_user::text")
    assert row["fresh"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cron": "* 24 * * *"}, "cron: hour 24 is outside 0-23"),
        ({"cron": "*/61 * * * *"}, "cron: minute: the step of `\\*/61` is outside 1-60"),
        ({"cron": "50-10 * * * *"}, "runs backwards"),
        ({"cron": "0 0 30 2 *"}, "would never fire"),
        ({"cron": "@reboot"}, "is not supported"),
        ({"cron": "* * * * * * 2030"}, "7 fields where 5 or 6"),
        ({"every": timedelta(milliseconds=900)}, "every must lie between 1 second"),
        ({"cron": "@daily", "every": timedelta(hours=1)}, "exactly one of cron and every"),
        ({"cron": None}, "exactly one of cron and every"),
        ({"timezone": "Europe/Vienna; drop"}, "timezone must be a name"),
        ({"name": ""}, "name must be a name"),
        ({"name": "a\nb"}, "name must be a name"),
        ({"name": "x" * 300}, "name must be a name"),
        ({"overlap": "queue"}, "overlap must be"),
        ({"misfire": "run"}, "misfire must be"),
        ({"catch_up_limit": 0}, "catch_up_limit must lie"),
        ({"jitter": timedelta(seconds=-1)}, "jitter must lie"),
        ({"resume_at": "2030-01-01"}, "resume_at needs paused"),
        ({"payload": '{"a":' * 101 + "1" + "}" * 101}, "nest at most 100 deep"),
    ],
)
async def test_nonsense_is_refused_in_words(conn: Connection[Record], columns: dict[str, Any], message: str) -> None:
    """B89. The constraint's name, or the error it raises, is all that the author of an INSERT gets to see."""
    if isinstance(columns.get("resume_at"), str):
        columns = {"resume_at": await conn.fetchval("select now()")}
    with pytest.raises(REFUSED, match=message):
        await make_schedule(conn, **columns)


async def test_odd_names_come_back_as_they_went_in(conn: Connection[Record]) -> None:
    """B89: quotes, emoji, right-to-left text."""
    name = "\u200fשלום 'x' \"y\" 🦉 \\ %s"  # noqa: RUF001
    await make_schedule(conn, name)
    assert await conn.fetchval("select name from rota.schedules") == name


async def test_months_are_refused_and_a_day_is_24_hours(conn: Connection[Record]) -> None:
    """A month has no length, so its k-th multiple has no instant."""
    with pytest.raises(REFUSED, match="every must lie"):
        await conn.execute("insert into rota.schedules (name, handler, every) values ('s', 'h', '1 month')")
    await conn.execute("insert into rota.schedules (name, handler, every) values ('s', 'h', '1 day')")


NUMBERS = st.integers(0, 62).map(str)
NAMES = st.sampled_from(["mon", "SUN", "fri", "jan", "Dec", "feb", "foo"])
VALUES = NUMBERS | NUMBERS | NAMES
ITEMS = st.one_of(
    st.sampled_from(
        ["*", "*", "*", "L", "l5", "5L", "FRIL", "LSAT", "?", "H", "15W", "LW", "", "5#3", "mon#5", "5#6", "#3"]
    ),
    VALUES,
    st.builds("{}-{}".format, VALUES, VALUES),
    st.builds("*/{}".format, NUMBERS),
    st.builds("{}/{}".format, VALUES, NUMBERS),
    st.builds("{}-{}/{}".format, VALUES, VALUES, NUMBERS),
    st.builds("L{}".format, VALUES),
    st.builds("{}L".format, VALUES),
    st.builds("{}#{}".format, VALUES, st.integers(0, 6)),
)
SMALL = st.one_of(
    st.just("*"),
    st.just("*"),
    st.integers(1, 7).map(str),
    st.builds("{}-{}".format, st.integers(1, 3), st.integers(3, 7)),
    st.sampled_from(["*/2", "1/2", "1,5", "6-7"]),
)
DAYS = st.one_of(SMALL, st.sampled_from(["29", "30", "31", "L", "30,31", "*/30", "*/31", "29-31", "1,L"]))
MONTHS = st.one_of(SMALL, st.sampled_from(["2", "feb", "2,4", "4,6,9,11", "feb-apr"]))
WEEKDAYS = st.one_of(SMALL, st.sampled_from(["5L", "L5", "1#5", "*/2", "1#1,2", "mon-fri", "*,5L", "sun", "7", "5-7"]))
FIELDS = st.lists(ITEMS, min_size=1, max_size=3).map(",".join)
EXPRESSIONS = st.one_of(
    st.lists(FIELDS, min_size=4, max_size=7).map(" ".join),
    st.builds("{} {} {} {} {}".format, SMALL, SMALL, DAYS, MONTHS, WEEKDAYS),
    st.builds("{} {} {} {} {} {}".format, SMALL, SMALL, SMALL, DAYS, MONTHS, WEEKDAYS),
    st.sampled_from(
        ["@daily", "@Hourly", " @yearly ", "@reboot", "@every 5m", "", " ", "TZ=UTC * * * * *", "1 1 1 1 1\t"]
    ),
    st.text(alphabet="0123456789*/-,LlWH?#@ \t\nmonjaé", max_size=30),
)


def refusal(expression: str) -> str | None:
    """Return why Python refuses an expression, as the database says it; None for a valid one."""
    try:
        Cron(expression)
    except InvalidCron as error:
        return f"cron: {error}"
    return None


async def test_f14_sql_and_python_refuse_the_same_expressions_in_the_same_words(database: Database) -> None:
    """F14: also the cure. An expression that one accepts and the other refuses would be stored and never fire, or not be stored."""
    async with database.connect() as conn:
        statement = await conn.prepare("select rota.is_cron($1)")

        async def in_sql(expression: str) -> str | None:
            try:
                assert await statement.fetchval(expression)
            except REFUSED as error:
                return str(error)
            return None

        loop = asyncio.get_running_loop()

        @settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
        @given(EXPRESSIONS)
        def agree(expression: str) -> None:
            theirs = asyncio.run_coroutine_threadsafe(in_sql(expression), loop).result(10)
            assert theirs == refusal(expression), repr(expression)

        await asyncio.to_thread(agree)


@pytest.mark.parametrize(
    "expression",
    [
        *("", "* * * *", "@reboot", "@every 5m", "TZ=UTC 0 0 * * *", "0 0 1 1 * 2027", "0 0 0 1 1 * 2027", "0 0 é * *"),
        *(
            "60 * * * *",
            "0 0 * FOO *",
            "0 0 * * FRI-MON",
            "0 0 * * SAT-SUN",
            "0 0 * * 5-1/2",
            "50-10 * * * *",
            "59-0 * * * *",
        ),
        *("*/61 * * * *", "*/0 * * * *", "0 0 ? * MON", "R R * * *", "H(0-5) H * * *", "0 0 15W * *", "0 0 LW * *"),
        *(
            "0 0 L-3 * *",
            "0 0 * * L",
            "0 0 * * 5#6",
            "0 0 * * FRI#0",
            "0 0 * * L#2",
            "1,,2 * * * *",
            "1- * * * *",
            "-1 * * * *",
        ),
        *(
            "0 0 * JANUARY *",
            "0 0 * * friday,monday",
            "0 0 * may- *",
            "0 0 1 * TUESDAY-5",
            "a_b * * * *",
            "\x7f * * * *",
        ),
        *(
            "0 0 30 2 *",
            "0 0 31 2,4,6 *",
            "0 0 31 4,6 *",
            "0 0 */31 * 5#3",
            "0 0 L 2 *",
            "x" * 1001,
            "\U0001f600 * * * *",
        ),
    ],
)
async def test_f14_a_refusal_has_the_cure(expression: str, conn: Connection[Record]) -> None:
    """F14: each message, by INSERT."""
    if (said := refusal(expression)) is None:
        assert await conn.fetchval("select rota.is_cron($1)", expression)
        return
    with pytest.raises(REFUSED, match=re.escape(said) + "$"):
        await make_schedule(conn, cron=expression)


async def test_a_cron_expression_is_read_alike_in_every_language(conn: Connection[Record]) -> None:
    """By Turkish rules FRI has no dot in small letters either, and `@DAILY` none: the CHECK must not ask the database's locale."""
    folding = await conn.fetch(
        "select proname, line from pg_proc cross join regexp_split_to_table(prosrc, '\n') as line "
        "where pronamespace = 'rota'::regnamespace and line ~ '\\m(lower|upper|initcap)\\('"
    )
    assert folding
    assert [row for row in folding if 'collate "C"' not in row["line"]] == []
    turkish = await conn.fetchval("select min(collname) from pg_collation where collname ~* '^tr[-_]'")
    if turkish is None:
        pytest.skip("the other half needs a server that knows Turkish")
    assert await conn.fetchval(f"select lower('FRI' collate \"{turkish}\")") != "fri"
    for expression in ("0 9 * * FRI", "@DAILY", "@MIDNIGHT", "0 9 * * LFRI"):
        assert await conn.fetchval(f'select rota.is_cron($1 collate "{turkish}")', expression)


# ── edits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_daemons_columns_are_read_only(conn: Connection[Record]) -> None:
    """Nobody forges what the daemons write."""
    await make_schedule(conn)
    for column in ("next_fire_at", "last_fire_at", "last_success_at", "invalid_reason", "version"):
        with pytest.raises(asyncpg.PostgresError, match=f'cannot update column "{column}"'):
            await conn.execute(f"update rota.schedules set {column} = null")


async def test_insert_on_conflict_and_returning_work_on_the_view(conn: Connection[Record]) -> None:
    """Tools that synchronise schedules use upserts."""
    upsert = """
        insert into rota.schedules (name, handler, cron) values ('s', 'h', $1)
        on conflict (name) do update set cron = excluded.cron
        returning schedule_id
    """
    first = await conn.fetchval(upsert, "0 1 * * *")
    again = await conn.fetchval(upsert, "0 2 * * *")
    assert first == again
    assert await conn.fetchval("select cron from rota.schedules") == "0 2 * * *"
    assert (await read_clock(conn, first))["version"] == 2


async def test_an_edit_of_when_it_fires_has_it_planned_anew(conn: Connection[Record]) -> None:
    """A decision that was made on the old definition must not be written."""
    made = await make_schedule(conn)
    await make_due(conn, made, ago=timedelta(hours=-1))
    before = await read_clock(conn, made)
    for column, value in (
        ("cron", "1 1 * * *"),
        ("timezone", "Asia/Tokyo"),
        ("dst_gap", "skip"),
        ("dst_fold", "both"),
        ("start_at", await conn.fetchval("select now()")),
        ("end_at", await conn.fetchval("select now() + interval '9 y'")),
    ):
        await make_due(conn, made, ago=timedelta(hours=-1))
        await conn.execute(f"update rota.schedules set {column} = $1", value)
        after = await read_clock(conn, made)
        assert (after["unplanned"], after["version"]) == (True, before["version"] + 1)
        before = after
    assert await read_fires(conn) == []


async def test_other_edits_leave_the_clock_alone(conn: Connection[Record]) -> None:
    """B31: to change the payload, or to save a row unchanged, must neither fire nor skip anything."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    edited = await conn.fetchval("select edited_at from rota.schedules")
    await conn.execute("update rota.schedules set payload = '[1]', overlap = 'allow', cron = cron, paused = paused")
    assert (await read_clock(conn, made))["next_fire_at"] == due
    assert await conn.fetchval("select edited_at from rota.schedules") == edited


async def test_an_edit_records_the_due_stretch_that_nobody_decided(conn: Connection[Record]) -> None:
    """An instant that had come before the edit is accounted for, though it will not run."""
    made = await make_schedule(conn, cron=None, every=timedelta(hours=1))
    due = await make_due(conn, made, ago=timedelta(hours=3, minutes=10))
    await conn.execute("update rota.schedules set every = '2 hours'")
    row = await conn.fetchrow("select * from rota.fires")
    assert row is not None
    assert (row["disposition"], row["missed_from"], row["missed_count"]) == ("skipped_edit", due, 4)
    assert row["scheduled_for"] == due + timedelta(hours=3)


async def test_a_cron_stretch_is_recorded_by_its_first_instant_and_until_when(conn: Connection[Record]) -> None:
    """SQL can't count the instants of an expression; it says up to when the row speaks."""
    made = await make_schedule(conn)
    due = await make_due(conn, made, ago=timedelta(hours=3))
    await conn.execute("delete from rota.schedules")
    row = await conn.fetchrow("select * from rota.fires")
    assert row is not None
    assert (row["disposition"], row["scheduled_for"], row["missed_count"]) == ("skipped_deleted", due, None)
    assert "until" in row["note"]
    assert await conn.fetchval("select count(*) from rota.schedule_clocks") == 0


async def test_deleting_and_pausing_settle_the_fires_that_wait(conn: Connection[Record]) -> None:
    """Nothing waits for a turn that never comes."""
    for name in ("paused", "deleted"):
        made = await make_schedule(conn, name)
        await conn.execute(
            "insert into rota.fires (scheduled_for, schedule_id, name, disposition) values (now(), $1, $2, 'waiting')",
            made,
            name,
        )
    await conn.execute("update rota.schedules set paused = true where name = 'paused'")
    await conn.execute("delete from rota.schedules where name = 'deleted'")
    found = await conn.fetch("select name, disposition from rota.fires")
    assert {row[0]: row[1] for row in found} == {"paused": "skipped_paused", "deleted": "skipped_deleted"}


async def test_an_edit_waits_for_a_decision_under_way_and_sees_it(database: Database, conn: Connection[Record]) -> None:
    """Decided, then edited: the instant is in one row, not in two and not in none."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    async with database.connect() as daemon:
        decision = daemon.transaction()
        await decision.start()
        await daemon.execute(
            "update rota.schedule_clocks set last_fire_at = next_fire_at, next_fire_at = now() + interval '1 h'"
        )
        await daemon.execute(
            "insert into rota.fires (scheduled_for, schedule_id, name, disposition) values ($1, $2, 's', 'enqueued')",
            due,
            made,
        )
        edit = asyncio.ensure_future(conn.execute("update rota.schedules set cron = '1 1 * * *'"))
        await asyncio.sleep(0)
        await decision.commit()
        await edit
    assert await read_fires(conn) == [("enqueued", due)]


async def test_a_rolled_back_edit_leaves_no_trace(conn: Connection[Record]) -> None:
    """Edits are ordinary transactions."""
    made = await make_schedule(conn)
    due = await make_due(conn, made)
    edit = conn.transaction()
    await edit.start()
    await conn.execute("update rota.schedules set cron = '1 1 * * *'")
    await edit.rollback()
    assert ((await read_clock(conn, made))["next_fire_at"], await read_fires(conn)) == (due, [])


# ── the functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_put_schedule_states_the_whole_and_keeps_a_pause(conn: Connection[Record]) -> None:
    """A deployment that puts its schedules must not undo what an operator did in an incident."""
    first = await conn.fetchval("select rota.put_schedule('s', 'h', cron => '0 1 * * *', priority => 1)")
    await conn.fetchval("select rota.pause_schedule('s', reason => 'broken')")
    again = await conn.fetchval("select rota.put_schedule('s', 'g', every => '1 hour')")
    row = await conn.fetchrow("select * from rota.schedules")
    assert row is not None
    assert (again, row["handler"], row["cron"], row["every"]) == (first, "g", None, timedelta(hours=1))
    assert (row["priority"], row["paused"]) == (5, True)


async def test_putting_the_same_again_changes_nothing(conn: Connection[Record]) -> None:
    """B31: a start of the application must not move anything."""
    put = "select rota.put_schedule('s', 'h', cron => '0 1 * * *')"
    made = await conn.fetchval(put)
    due = await make_due(conn, made, ago=timedelta(hours=-1))
    await conn.fetchval(put)
    assert ((await read_clock(conn, made))["next_fire_at"], (await read_clock(conn, made))["version"]) == (due, 1)


@pytest.mark.parametrize(
    "call",
    ["pause_schedule('x')", "resume_schedule('x')", "run_schedule_now('x')", "remove_schedule('x')"],
)
async def test_an_unknown_schedule_has_a_state_of_its_own(conn: Connection[Record], call: str) -> None:
    """RT002."""
    with pytest.raises(asyncpg.PostgresError, match="there is no schedule 'x'") as refused:
        await conn.execute(f"select rota.{call}")
    assert refused.value.sqlstate == "RT002"


async def test_pause_and_resume_say_whether_anything_changed(conn: Connection[Record]) -> None:
    """And both are in the audit."""
    made = await make_schedule(conn)
    assert await conn.fetchval("select rota.pause_schedule('s', reason => 'why')")
    assert not await conn.fetchval("select rota.pause_schedule('s')")
    assert (await read_clock(conn, made))["unplanned"] is None
    assert await conn.fetchval("select rota.resume_schedule('s')")
    assert not await conn.fetchval("select rota.resume_schedule('s')")
    assert (await read_clock(conn, made))["unplanned"]
    assert await conn.fetchval("select array_agg(action order by audit_id) from rota.audit") == ["pause", "resume"]


async def test_pausing_can_cancel_what_it_had_enqueued(conn: Connection[Record]) -> None:
    """In an incident one wants both."""
    await make_schedule(conn)
    job = await conn.fetchval("select rota.run_schedule_now('s')")
    await conn.execute("select rota.pause_schedule('s', cancel_live => true)")
    assert await conn.fetchval("select state from rota.job_status where job_id = $1", job) == "cancelled"


async def test_run_now_takes_a_day_for_24_hours_in_whatever_timezone_it_is_called(conn: Connection[Record]) -> None:
    """The server adds days by the clock of the session's zone. At any time of the year one of these crosses a change of it."""
    await conn.execute("set timezone = 'Europe/Berlin'")
    for days in (100, 200, 300):
        await conn.execute(
            "select rota.put_schedule('s', handler => 'x', every => '1 h', start_within => $1)", timedelta(days)
        )
        job = await conn.fetchval("select rota.run_schedule_now('s')")
        left = await conn.fetchval("select extract(epoch from start_by - run_at) from rota.jobs where job_id = $1", job)
        assert left == days * 24 * 3600


async def test_run_now_has_an_instant_and_a_job_of_its_own(conn: Connection[Record]) -> None:
    """Beside whatever else runs, also while paused; the clock doesn't move."""
    made = await make_schedule(conn, paused=True, payload='{"n": 1}')
    jobs = [await conn.fetchval("select rota.run_schedule_now('s')") for _ in range(3)]
    assert len(set(jobs)) == 3
    assert await read_dispositions(conn, made) == ["run_now"] * 3
    rows = await conn.fetch("select schedule_id, exclusive, payload, scheduled_for from rota.jobs")
    assert {(row["schedule_id"], row["exclusive"], row["payload"]) for row in rows} == {(made, False, '{"n": 1}')}
    assert all(row["scheduled_for"].microsecond for row in rows)


async def _refused(conn: Connection[Record], statement: str) -> str | None:
    try:
        await conn.execute(statement)
    except asyncpg.PostgresError as error:
        return error.sqlstate
    return None


async def test_run_now_gives_no_number_to_a_job_that_is_not_there(conn: Connection[Record], database: Database) -> None:
    """Removed between the look at its name and the job: the caller would wait for the end of a job that never was."""
    await make_schedule(conn)
    async with database.connect() as other, database.connect() as watcher:
        await other.execute("begin; lock table rota.fires in share mode")
        async with asyncio.TaskGroup() as group:
            call = group.create_task(_refused(conn, "select rota.run_schedule_now('s')"))
            await wait_until_blocked(conn, watched_by=watcher)
            await other.execute("delete from rota.schedules; commit")
    assert call.result() == "RT002"
    assert await conn.fetchval("select count(*) from rota.fires") == 0


async def test_ran_knows_what_succeeded(conn: Connection[Record]) -> None:
    """Asked by people and by jobs that depend on another schedule's run."""
    await make_schedule(conn)
    job = await conn.fetchval("select rota.run_schedule_now('s')")
    at = await conn.fetchval("select scheduled_for from rota.fires")
    assert not await conn.fetchval("select rota.ran('s', $1)", at)
    await conn.execute(
        """
        with ended as (delete from rota.jobs where job_id = $1 returning *)
        insert into rota.job_runs (job_id, scheduled_for, finished_at, attempts, outcome, handler, queue)
        select job_id, scheduled_for, now(), 1, 'succeeded', handler, queue from ended
        """,
        job,
    )
    assert await conn.fetchval("select rota.ran('s', $1)", at)
    await conn.execute("delete from rota.schedules")
    assert await conn.fetchval("select rota.ran('s', $1)", at)
    assert await conn.fetchval("select job_state from rota.fire_history") == "succeeded"


async def test_jitter_is_stable_and_within_its_bound(conn: Connection[Record]) -> None:
    """The same schedule at the same second of each hour, thousands spread evenly."""
    offsets = [
        row[0] for row in await conn.fetch("select rota.jitter_offset(n, '10 min') from generate_series(1, 2000) as n")
    ]
    assert all(timedelta(0) <= offset < timedelta(minutes=10) for offset in offsets)
    assert 240 < sum(offset.total_seconds() for offset in offsets) / 2000 < 360
    assert offsets[6] == await conn.fetchval("select rota.jitter_offset(7, '10 min')")
    assert await conn.fetchval("select rota.jitter_offset(7, '0')") == timedelta(0)


def test_every_constraint_says_its_whole_sentence() -> None:
    """PostgreSQL cuts a name at 63 bytes, and the name is the message."""
    names = re.findall(r'constraint "([^"]+)"', MIGRATIONS["0005_schedules"])
    assert [name for name in names if len(name.encode()) > 63] == []
