"""rota.enqueue and its kin on the connections that people have: one meaning, whatever the driver."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
import sqlalchemy

import rota
from drivers import ASYNC, SYNC
from factories import make_running_job
from rota.client.columns import COLUMNS, option

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

ALL_COLUMNS: dict[str, Any] = {
    "queue": "q",
    "run_at": datetime(2030, 1, 1, tzinfo=UTC),
    "priority": 1,
    "unique_key": "u",
    "on_conflict": "error",
    "max_attempts": 2,
    "backoff_base": timedelta(seconds=3),
    "backoff_cap": timedelta(days=4, microseconds=1),
    "retry_for": timedelta(seconds=5),
    "timeout": timedelta(seconds=6),
    "lease": timedelta(seconds=7),
    "delivery": "at_most_once",
    "start_by": datetime(2031, 1, 1, tzinfo=UTC),
    "idempotency_key": "i",
    "meta": {"tenant": "100% :p1 $1"},
}
PAYLOAD = {"text": "100% :p1 $1 ::text \\ 'x' \U0001f600", "n": 2**53 + 1, "list": [1, None, True, 1.5]}


SECRET = {"password": "yranac-TERC3S"[::-1]}
"""Its text stands in no line of source, which tracebacks show."""


class Undo(Exception):
    """Leaves a transaction without committing it."""


@pytest.mark.parametrize("driver", ASYNC)
async def test_a_job_has_all_it_was_given(driver: str, database: Database, conn: Connection[Record]) -> None:
    """What a driver does to % and : and $ must not reach the row, nor may a number be rounded."""
    async with ASYNC[driver](database.dsn) as theirs:
        made = await rota.enqueue(theirs, "h", PAYLOAD, **ALL_COLUMNS)
    await _has_all(conn, made)


@pytest.mark.parametrize("driver", SYNC)
async def test_a_job_has_all_it_was_given_sync(driver: str, database: Database, conn: Connection[Record]) -> None:
    """The blocking twin says the same."""
    with SYNC[driver](database.dsn) as theirs:
        made = rota.enqueue_sync(theirs, "h", PAYLOAD, **ALL_COLUMNS)
    await _has_all(conn, made)


async def _has_all(conn: Connection[Record], made: rota.Enqueued) -> None:
    assert made.created
    job = await conn.fetchrow("select * from rota.jobs where job_id = $1", made.job_id)
    assert job is not None
    expected = {name: value for name, value in ALL_COLUMNS.items() if name not in {"on_conflict", "meta"}}
    assert {name: job[name] for name in expected} == expected
    assert json.loads(job["meta"]) == ALL_COLUMNS["meta"]
    assert json.loads(job["payload"]) == PAYLOAD


@pytest.mark.parametrize("driver", ASYNC)
async def test_it_joins_the_callers_transaction(driver: str, database: Database, conn: Connection[Record]) -> None:
    """A job without the order that it is about, or an order without its job, is what this exists to prevent."""
    with pytest.raises(Undo):  # noqa: PT012
        async with ASYNC[driver](database.dsn) as theirs:
            made = await rota.enqueue(theirs, "h", unique_key="k")
            assert await rota.enqueue(theirs, "h", unique_key="k") == rota.Enqueued(made.job_id, created=False)
            assert await rota.enqueue_many(theirs, "h", [{"n": 1}, None]) == 2
            assert not await conn.fetchval("select count(*) from rota.jobs")
            raise Undo
    assert not await conn.fetchval("select count(*) from rota.jobs")


@pytest.mark.parametrize("driver", SYNC)
async def test_it_joins_the_callers_transaction_sync(driver: str, database: Database, conn: Connection[Record]) -> None:
    """The blocking twin does the same."""
    with pytest.raises(Undo), SYNC[driver](database.dsn) as theirs:  # noqa: PT012
        made = rota.enqueue_sync(theirs, "h", unique_key="k")
        assert rota.enqueue_sync(theirs, "h", unique_key="k") == rota.Enqueued(made.job_id, created=False)
        assert rota.enqueue_many_sync(theirs, "h", [{"n": 1}, None]) == 2
        assert not await conn.fetchval("select count(*) from rota.jobs")
        raise Undo
    assert not await conn.fetchval("select count(*) from rota.jobs")


@pytest.mark.parametrize("driver", ASYNC)
async def test_a_refusal_is_the_same_on_every_driver_and_shows_no_payload(driver: str, database: Database) -> None:
    """B103: a driver's own error repeats the row, or its parameters."""
    with pytest.raises(rota.Refused, match="priority must lie between 0") as refused:
        async with ASYNC[driver](database.dsn) as theirs:
            await rota.enqueue(theirs, "h", SECRET, priority=10)
    assert refused.value.sqlstate == "23514"
    assert "S3CRET-canary" not in _as_logged(refused)


@pytest.mark.parametrize("driver", ASYNC)
async def test_new_values_are_queued_behind_a_running_job(
    driver: str, database: Database, conn: Connection[Record]
) -> None:
    """They run as a job of their own once it has ended."""
    job_id, token = await make_running_job(conn, unique_key="k")
    async with ASYNC[driver](database.dsn) as theirs:
        made = await rota.enqueue(theirs, "h", [2], unique_key="k", on_conflict="queue_one")
    assert (made.job_id, made.created, made.outcome) == (job_id, False, "queued")
    await conn.execute("select rota.complete($1, $2)", job_id, token)
    assert await conn.fetchval("select payload from rota.jobs") == "[2]"


@pytest.mark.parametrize("driver", SYNC)
def test_new_values_are_queued_behind_a_running_job_sync(driver: str, database: Database) -> None:
    """The blocking twin."""
    with SYNC[driver](database.dsn) as theirs:
        rota.enqueue_sync(theirs, "h", unique_key="k")
        made = rota.enqueue_sync(theirs, "h", [2], unique_key="k", on_conflict="queue_one")
    assert made.outcome == "replaced"


@pytest.mark.parametrize("driver", SYNC)
def test_a_refusal_is_the_same_on_every_driver_and_shows_no_payload_sync(driver: str, database: Database) -> None:
    """B103: the blocking twin says the same."""
    with pytest.raises(rota.Refused, match="live job") as refused, SYNC[driver](database.dsn) as theirs:  # noqa: PT012
        rota.enqueue_sync(theirs, "h", unique_key="k")
        rota.enqueue_sync(theirs, "h", SECRET, unique_key="k", on_conflict="error")
    assert refused.value.sqlstate == "RT005"
    assert "S3CRET-canary" not in _as_logged(refused)


def _as_logged(raised: pytest.ExceptionInfo[Any]) -> str:
    import traceback

    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("driver", SYNC)
def test_what_else_goes_wrong_is_the_drivers_own_error_without_the_parameters(driver: str, database: Database) -> None:
    """People's retry loops look for their driver's errors; B103: SQLAlchemy prints what was to be sent."""
    with pytest.raises(Exception) as raised, SYNC[driver](database.dsn) as theirs:  # noqa: PT011, PT012
        run = getattr(theirs, "exec_driver_sql", None) or getattr(theirs, "execute", None)
        if run is None:
            with theirs.cursor() as cursor:
                cursor.execute("set local search_path to ''; drop schema rota cascade")
        else:
            run(_text(theirs, "drop schema rota cascade"))
        rota.enqueue_sync(theirs, "h", SECRET)
    assert not isinstance(raised.value, rota.RotaError | TypeError)
    assert "rota" in str(raised.value)
    assert "S3CRET-canary" not in _as_logged(raised)


def _text(theirs: Any, sql: str) -> Any:
    return sql if isinstance(theirs, psycopg.Connection | sqlalchemy.Connection) else sqlalchemy.text(sql)


@pytest.mark.parametrize("driver", SYNC)
async def test_the_wrong_kind_of_connection_is_told_where_to_go(driver: str, database: Database) -> None:
    """Both kinds look alike; a coroutine that nobody awaits, or a driver's own complaint, would help nobody."""
    with SYNC[driver](database.dsn) as theirs:
        with pytest.raises(TypeError, match=r"rota\.enqueue can't use .* that is for rota\.enqueue_sync"):
            await rota.enqueue(theirs, "h")
        with pytest.raises(TypeError, match=r"that is for rota\.enqueue_many_sync"):
            await rota.enqueue_many(theirs, "h", [])


@pytest.mark.parametrize("driver", ASYNC)
async def test_the_wrong_kind_of_connection_is_told_where_to_go_sync(driver: str, database: Database) -> None:
    """The other way round."""
    async with ASYNC[driver](database.dsn) as theirs:
        with pytest.raises(TypeError, match=r"rota\.enqueue_sync can't use .* that is for rota\.enqueue\b"):
            rota.enqueue_sync(theirs, "h")
        with pytest.raises(TypeError, match=r"that is for rota\.enqueue_many\b"):
            rota.enqueue_many_sync(theirs, "h", [])


async def test_what_only_makes_connections_is_refused_with_the_way_out(database: Database) -> None:
    """An engine or a pool would insert in a transaction of its own, which is not what is asked for."""
    engine = sqlalchemy.create_engine("postgresql+psycopg://")
    with pytest.raises(TypeError, match="take a connection from it"):
        rota.enqueue_sync(engine, "h")  # type: ignore[arg-type]
    with psycopg.connect(database.dsn) as theirs, pytest.raises(TypeError, match=r"cursor\.connection"):
        rota.enqueue_sync(theirs.cursor(), "h")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an asyncpg connection, a psycopg AsyncConnection"):
        await rota.enqueue(None, "h")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["run_at", "start_by"])
async def test_a_naive_datetime_is_refused(name: str, conn: Connection[Record]) -> None:
    """It would be an instant that depends on the time zone of whoever reads it."""
    with pytest.raises(ValueError, match="must have a zone"):
        await rota.enqueue(conn, "h", **{name: datetime(2030, 1, 1)})  # type: ignore[arg-type]  # noqa: DTZ001
    with pytest.raises(ValueError, match="must have a zone"):
        await rota.enqueue_many(conn, "h", [1], run_at=lambda _: datetime(2030, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("driver", ASYNC)
async def test_f7_a_job_with_a_value_of_the_wrong_kind_is_refused_by_name(driver: str, database: Database) -> None:
    """F7: `timeout=30` was taken for seconds, and `run_at="tomorrow"` for an instant."""
    wrong: dict[str, Any] = {
        "timeout": 30,
        "lease": "30",
        "queue": 5,
        "run_at": "tomorrow",
        "priority": "5",
        "meta": [],
    }
    async with ASYNC[driver](database.dsn) as theirs:
        for name, value in wrong.items():
            with pytest.raises(TypeError, match=rf"{name} can't be a {type(value).__name__}: write"):
                await rota.enqueue(theirs, "h", **{name: value})
            with pytest.raises(TypeError, match=rf"{name} can't be a {type(value).__name__}: write"):
                await rota.enqueue_many(theirs, "h", [1], **{name: value})
        with pytest.raises(TypeError, match="handler can't be a int: write the name"):
            await rota.enqueue(theirs, 5)  # type: ignore[arg-type]


async def test_a_daemons_column_is_refused_as_such(conn: Connection[Record]) -> None:
    """To name the public column that is spelled most like it would help nobody who writes a state."""
    rows = await conn.fetch(
        "select attname from pg_attribute where attrelid = 'rota.jobs'::regclass and attnum > 0 and not attisdropped"
    )
    theirs = {row["attname"] for row in rows} - COLUMNS - {"handler", "payload"}
    for name in theirs:
        with pytest.raises(TypeError, match=f"rota.jobs.{name} is written by daemons only"):
            option(name, 1)
    with pytest.raises(TypeError, match="no public column 'prority': did you mean 'priority'"):
        option("prority", 1)


async def test_many_jobs_may_each_have_columns_of_their_own(conn: Connection[Record]) -> None:
    """A key or an instant that all jobs shared would be no use; a live job with the key is kept."""
    first = datetime(2030, 1, 1, tzinfo=UTC)
    orders = [{"id": number} for number in (7, 8, 7)]
    made = await rota.enqueue_many(
        conn,
        "h",
        orders,
        queue="q",
        timeout=timedelta(seconds=9),
        unique_key=lambda order: f"order:{order['id']}",
        run_at=lambda order: first + timedelta(days=order["id"]),
        meta=lambda order: {"id": order["id"]} if order["id"] == 8 else None,
    )
    assert made == 2
    jobs = await conn.fetch("select * from rota.jobs order by unique_key")
    assert [(job["unique_key"], job["run_at"].day, job["meta"]) for job in jobs] == [
        ("order:7", 8, None),
        ("order:8", 9, '{"id": 8}'),
    ]
    assert {(job["queue"], job["timeout"]) for job in jobs} == {("q", timedelta(seconds=9))}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"unique_key": "k"}, "must differ from job to job"),
        ({"on_conflict": "replace"}, "on_conflict can only be 'keep'"),
        ({"prority": 1}, "did you mean 'priority'"),
        ({"queue": lambda _: "q"}, "queue can't be a function"),
    ],
)
async def test_many_jobs_refuse_what_they_can_not_keep(
    columns: dict[str, Any], message: str, conn: Connection[Record]
) -> None:
    """Nothing is inserted by a call that is wrong."""
    with pytest.raises(TypeError, match=message):
        await rota.enqueue_many(conn, "h", [1, 2], **columns)
    assert not await conn.fetchval("select count(*) from rota.jobs")


async def test_many_large_jobs_go_in_statements_that_fit(conn: Connection[Record]) -> None:
    """Thousands of payloads of a megabyte would be a parameter that the server can't take."""
    assert await rota.enqueue_many(conn, "h", ({"n": n, "text": "x" * 900_000} for n in range(12))) == 12
    assert await conn.fetchval("select count(distinct payload->'n') from rota.jobs") == 12


ODD = [
    "tab\there",
    "line\nbreak",
    "back\\slash \\N \\. \\t",
    "\U0001f600 é",
    '"quoted"',
    "\\u0000 isn't one",
    "",
    "null",
]


@pytest.mark.parametrize("driver", ASYNC)
async def test_many_payloads_arrive_as_they_were(driver: str, database: Database, conn: Connection[Record]) -> None:
    """COPY has signs of its own, which must not reach the row."""
    payloads = [None, *ODD, {"tab\there": ["a\\b"]}]
    async with ASYNC[driver](database.dsn) as theirs:
        shared: dict[str, Any] = {k: v for k, v in ALL_COLUMNS.items() if k not in {"unique_key", "on_conflict"}}
        shared |= {"queue": "q \\N\\", "idempotency_key": lambda payload: f"k\\{payload}"}
        assert await rota.enqueue_many(theirs, "h \\N", payloads, **shared) == len(payloads)
    jobs = await conn.fetch("select * from rota.jobs order by job_id")
    assert [json.loads(job["payload"]) for job in jobs] == [{}, *payloads[1:]]
    assert [job["idempotency_key"] for job in jobs] == [f"k\\{payload}" for payload in payloads]
    assert {job["handler"] for job in jobs} == {"h \\N"}
    for name in ALL_COLUMNS.keys() - {"unique_key", "on_conflict", "idempotency_key", "queue", "meta"}:
        assert {job[name] for job in jobs} == {ALL_COLUMNS[name]}, name
    assert {job["queue"] for job in jobs} == {"q \\N\\"}
    assert all(json.loads(job["meta"]) == ALL_COLUMNS["meta"] for job in jobs)


COPYING = [driver for driver in ASYNC if not driver.startswith("sqlalchemy")]


@pytest.mark.parametrize("driver", ASYNC)
@pytest.mark.parametrize("wrong", [{1: 2}, {"text": "\x00"}, {"deep": float("nan")}])
async def test_a_payload_that_is_refused_is_named_and_the_others_go_too(
    driver: str, wrong: Any, database: Database, conn: Connection[Record]
) -> None:
    """Half of what was asked for is worse than nothing, and the caller's transaction lives on."""
    async with ASYNC[driver](database.dsn) as theirs:
        await rota.enqueue(theirs, "before")
        payloads = [*({"n": n} for n in range(6000)), wrong, {"n": 7000}]
        with pytest.raises(rota.InvalidPayload, match=r"^payloads\[6000\]: payload \$"):
            await rota.enqueue_many(theirs, "h", payloads)
        await rota.enqueue(theirs, "after")
    assert await conn.fetchval("select array_agg(handler order by job_id) from rota.jobs") == ["before", "after"]


@pytest.mark.parametrize("driver", COPYING)
async def test_a_job_that_the_database_refuses_is_named_and_the_others_go_too(
    driver: str, database: Database, conn: Connection[Record]
) -> None:
    """A CHECK's name says what is wrong, but not with which of ten thousand."""
    async with ASYNC[driver](database.dsn) as theirs:
        await rota.enqueue(theirs, "before")
        with pytest.raises(rota.Refused, match=r"^payloads\[6000\]: .*priority must lie between") as refused:
            await rota.enqueue_many(
                theirs, "h", ({"n": n, **SECRET} for n in range(7000)), priority=lambda p: 10 if p["n"] == 6000 else 1
            )
        await rota.enqueue(theirs, "after")
    assert "S3CRET-canary" not in _as_logged(refused)
    assert await conn.fetchval("select array_agg(handler order by job_id) from rota.jobs") == ["before", "after"]


async def test_a_refused_statement_of_many_says_which_payloads_it_had(conn: Connection[Record]) -> None:
    """Jobs with a key go by statements of thousands, in which the database doesn't count."""
    with pytest.raises(rota.Refused, match=r"^payloads\[5000:5007\]: .*unique_key must have 1 to 500"):
        await rota.enqueue_many(conn, "h", range(5007), unique_key=lambda n: "" if n == 5006 else str(n))


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_without_a_transaction_many_are_all_or_none(
    in_transaction: bool, database: Database, conn: Connection[Record]
) -> None:
    """A COPY for each thousand, each committed, would leave half of them; one begun by a statement is the caller's."""
    if in_transaction:
        await conn.execute("begin")
    with pytest.raises(rota.InvalidPayload, match=r"payloads\[5999\]"):
        await rota.enqueue_many(conn, "h", [*range(5999), {1: 1}])
    assert await rota.enqueue_many(conn, "h", range(6000)) == 6000
    assert conn.is_in_transaction() == in_transaction
    async with await psycopg.AsyncConnection.connect(database.dsn) as other:
        seen = await (await other.execute("select count(*) from rota.jobs")).fetchone()
    assert seen == (0 if in_transaction else 6000,)


async def test_many_that_are_cancelled_as_they_begin_leave_no_transaction_open(
    conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller writes next would be in it, and be lost with the connection."""
    real = asyncpg.Connection.execute

    async def cancelled(self: Any, query: str, *args: Any, **kwargs: Any) -> str:
        said = await real(self, query, *args, **kwargs)
        if query == "begin":
            raise asyncio.CancelledError
        return said

    monkeypatch.setattr(asyncpg.Connection, "execute", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await rota.enqueue_many(conn, "h", [1, 2, 3])
    assert not conn.is_in_transaction()


def test_a_psycopg_connection_in_autocommit_keeps_all_or_none(database: Database) -> None:
    """Its transaction is ours then; else it is the caller's, who hasn't committed."""
    with psycopg.connect(database.dsn, autocommit=True) as theirs:
        with pytest.raises(rota.InvalidPayload):
            rota.enqueue_many_sync(theirs, "h", [*range(6000), {1: 1}])
        assert rota.enqueue_many_sync(theirs, "h", range(3)) == 3
        assert not theirs.info.transaction_status
    with psycopg.connect(database.dsn) as theirs:
        assert rota.enqueue_many_sync(theirs, "h", range(4)) == 4
        theirs.rollback()
        assert theirs.execute("select count(*) from rota.jobs").fetchone() == (3,)


def test_many_may_be_read_from_the_connection_that_they_go_to(database: Database) -> None:
    """A cursor of the server's, read row by row, while COPY keeps the connection busy, would be an error in the middle."""
    with psycopg.connect(database.dsn) as theirs, theirs.cursor("named") as rows:
        rows.execute("select n from generate_series(1, 12000) n")
        assert rota.enqueue_many_sync(theirs, "h", ({"n": n} for (n,) in rows)) == 12000
        assert theirs.execute("select count(distinct payload) from rota.jobs").fetchone() == (12000,)


def test_many_go_through_a_pipeline(database: Database) -> None:
    """psycopg can't COPY in one."""
    with psycopg.connect(database.dsn) as theirs, theirs.pipeline():
        assert rota.enqueue_many_sync(theirs, "h", range(3)) == 3


async def test_a_function_that_fails_leaves_with_its_own_error_and_nothing_is_made(conn: Connection[Record]) -> None:
    """It is the caller's own code: only which payload it was about is added."""

    def fails(payload: Any) -> int:
        raise KeyError(payload["password"])

    with pytest.raises(KeyError) as raised:
        await rota.enqueue_many(conn, "h", [SECRET], priority=fails)
    assert raised.value.__notes__ == ["in payloads[0]"]
    assert not await conn.fetchval("select count(*) from rota.jobs")
