"""What handlers do, and what becomes of their jobs: nothing that a handler does is anybody else's fault."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

import rota
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, ledger_rows, live_row, run_node
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection, Record

    from servers import Database


class Namelessness(type):
    """Makes a type that won't say its name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # that is the oddity
        raise ValueError("no name")


class Nameless(Exception, metaclass=Namelessness):
    """Whoever asks its type for a name gets an error."""


class Unspeakable(Exception):
    """An exception whose text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Abort(BaseException):
    """What some libraries raise to get past `except Exception`."""


class NoOrder(Exception):
    """What the handler below declares to be permanent."""


class Wordless(rota.Snooze):
    """A wish without what is wished for: it never called super().__init__."""

    def __init__(self) -> None:
        self.args = ()


class Groundless(rota.Cancel):
    """A cancellation that lacks its reason in the same way."""

    def __init__(self) -> None:
        self.args = ()


class OddKey:
    """A dict's key that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raised(error: BaseException) -> None:
    raise error


def _deeper() -> None:
    _deeper()


ODD: dict[str, Callable[[], Any]] = {
    "CancelledError": lambda: _raised(asyncio.CancelledError("mine")),
    "TimeoutError": lambda: _raised(TimeoutError("mine")),
    "SystemExit": lambda: _raised(SystemExit(3)),
    "KeyError": lambda: _raised(KeyError("nul \x00 and \udcff lone surrogate")),
    "ValueError": lambda: _raised(ValueError("x" * 5_000_000)),
    "Unspeakable": lambda: _raised(Unspeakable()),
    "RecursionError": _deeper,
    "ExceptionGroup": lambda: _raised(ExceptionGroup("several", [ValueError("one"), Unspeakable()])),
    "Abort": lambda: _raised(Abort("past except Exception")),
    "GeneratorExit": lambda: _raised(GeneratorExit()),
    "StopIteration": lambda: next(iter(())),
    "KeyboardInterrupt": lambda: _raised(KeyboardInterrupt()),
    "Nameless": lambda: _raised(Nameless()),
    "Wordless": lambda: _raised(Wordless()),
    "Groundless": lambda: _raised(Groundless()),
}

KINDS = {"StopIteration": "RuntimeError", "Wordless": "AttributeError", "Groundless": "AttributeError"}
"""Python itself turns a StopIteration that leaves a coroutine into a RuntimeError."""


def odd_app() -> rota.App:
    """One handler for each oddity, and a plain one beside them."""
    app = rota.App("odd")

    @app.handler("odd", max_attempts=1)
    async def odd(job: rota.Job[Any]) -> None:
        ODD[job.payload["raises"]]()

    @app.handler("odd in a thread", max_attempts=1)
    def odd_in_a_thread(job: rota.SyncJob[Any]) -> None:
        ODD[job.payload["raises"]]()

    @app.handler("plain")
    async def plain(job: rota.Job[Any]) -> Any:
        return job.payload

    return app


@pytest.mark.parametrize("handler", ["odd", "odd in a thread"])
async def test_whatever_a_handler_raises_is_its_own_jobs_failure(
    database: Database, conn: Connection[Record], handler: str
) -> None:
    """CancelledError, SystemExit, 5 MB of text, NULs: the job fails with a text that can be stored, the node goes on."""
    async with run_node(database.dsn, odd_app()) as node:
        jobs = {name: await insert_job(conn, handler, f'{{"raises": "{name}"}}') for name in ODD}
        for name, job_id in jobs.items():
            assert await final_outcome(conn, job_id) == "dead: exhausted", name
            (tried,) = await failed_attempts(conn, job_id)
            assert tried["outcome"] == "failed"
            assert len(tried["error"].encode()) <= 8192
            assert tried["error_kind"] == KINDS.get(name, name)
        after = await insert_job(conn, "plain")
        assert await final_outcome(conn, after) == "succeeded"
        assert node.crash is None


async def test_a_handler_that_cancels_its_own_task_costs_its_attempt_and_nothing_else(
    database: Database, conn: Connection[Record]
) -> None:
    """It fails with a text that says so, and neither its lease nor another attempt is lost."""
    app = rota.App("self")
    tries: list[int] = []

    @app.handler("suicide")
    async def suicide(job: rota.Job[Any]) -> None:
        tries.append(job.attempt)
        if job.attempt == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "suicide", backoff_base="interval '1 millisecond'")
        assert await final_outcome(conn, job_id) == "succeeded"
        (first,) = await failed_attempts(conn, job_id)
        assert (first["outcome"], first["error_kind"]) == ("failed", "CancelledError")
        assert "the handler cancelled its own task" in first["error"]
        assert node.crash is None
    assert tries == [1, 2]


@pytest.mark.parametrize(
    "reason",
    ["out of stock", "nul \x00", "long " * 100_000, "", "\udcff", None, 7, OddKey()],
    ids=lambda r: repr(r)[:12],
)
async def test_a_cancel_ends_the_job_whatever_its_reason_looks_like(
    database: Database, conn: Connection[Record], reason: Any
) -> None:
    """A reason that can't be stored as it is must neither fell the node nor have the job run again."""
    app = rota.App("moot")
    calls: list[int] = []

    @app.handler("moot")
    async def moot(job: rota.Job[Any]) -> None:
        calls.append(job.attempt)
        raise rota.Cancel(reason)

    async with run_node(database.dsn, app) as node:
        job_id = await insert_job(conn, "moot")
        assert await final_outcome(conn, job_id) == "cancelled"
        assert node.crash is None
    (run,) = await ledger_rows(conn, job_id)
    assert len(run["note"] or "") <= 8192
    assert calls == [1]


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


RESULTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a NUL": lambda: "a\x00b",
    "a surrogate": lambda: {"\udcff": "\udcff"},
    "no JSON": object,
    "NaN": lambda: float("nan"),
    "16 KB": lambda: "x" * 16384,
    "just too long once stored": lambda: list(range(1680)),
    "huge": lambda: 10**5000,
    "circular": _circle,
    "an odd key": lambda: {OddKey(): 1},
}


async def test_a_batch_with_bad_results_settles_every_one_of_its_jobs_as_done(
    database: Database, conn: Connection[Record]
) -> None:
    """The work is done when a result is looked at: one that can't be stored is dropped, alone."""
    app = rota.App("results")
    all_there = asyncio.Barrier(len(RESULTS))

    @app.handler("return")
    async def give(job: rota.Job[Any]) -> Any:
        await all_there.wait()
        return RESULTS[job.payload["returns"]]()

    async with run_node(database.dsn, app, queues="default:20") as node:
        jobs = {name: await insert_job(conn, "return", f'{{"returns": "{name}"}}') for name in RESULTS}
        for job_id in jobs.values():
            assert await final_outcome(conn, job_id) == "succeeded"
        assert node.crash is None
        assert node.metric("rota_settled_total", queue="default", handler="return", settlement="succeeded") == len(
            RESULTS
        )
    stored = {name: (await ledger_rows(conn, job_id))[0]["result"] for name, job_id in jobs.items()}
    assert stored["a NUL"] == '"a\\\\x00b"'
    assert stored["16 KB"] is stored["no JSON"] is stored["just too long once stored"] is stored["NaN"] is None


@dataclass
class Receipt:
    """A payload's type."""

    order: int
    email: str


class Order(BaseModel):
    """Another one."""

    order: int


class Strict(Order, extra="forbid"):
    """One whose refusals name the keys that it doesn't know."""


@dataclass
class Picky:
    """A type that refuses with an error of its own."""

    order: int

    def __post_init__(self) -> None:
        raise LookupError("no such order")


def typed_app(seen: list[Any]) -> rota.App:
    """Handlers with and without types."""
    app = rota.App("typed")

    @app.handler("receipt")
    async def receipt(job: rota.Job[Receipt]) -> None:
        seen.append(job.payload)

    @app.handler("order")
    async def order(job: rota.Job[Order]) -> None:
        seen.append(job.payload)

    @app.handler("strict")
    async def strict(job: rota.Job[Strict]) -> None:
        seen.append(job.payload)

    @app.handler("picky")
    async def picky(job: rota.Job[Picky]) -> None:
        seen.append(job.payload)

    @app.handler("plain")
    async def plain(job: rota.Job[Any]) -> None:
        seen.append(job.payload)

    @app.handler("thread")
    def thread(job: rota.SyncJob[Receipt]) -> None:
        seen.append(job.payload)

    return app


async def test_payloads_decode_into_the_handlers_type(database: Database, conn: Connection[Record]) -> None:
    """Dataclasses and models: the handler sees what it declared."""
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)):
        for handler in ("receipt", "thread"):
            job_id = await insert_job(conn, handler, '{"order": 7, "email": "a@b"}')
            assert await final_outcome(conn, job_id) == "succeeded"
        assert await final_outcome(conn, await insert_job(conn, "order", '{"order": 7}')) == "succeeded"
    assert seen == [Receipt(7, "a@b"), Receipt(7, "a@b"), Order(order=7)]


@pytest.mark.parametrize(
    ("handler", "payload"),
    [
        ("receipt", '{"order": "seven", "email": "a@b"}'),
        ("receipt", "[]"),
        ("order", "null"),
        ("picky", '{"order": 1}'),
        ("thread", "{}"),
        ("plain", '{"n": 1e5000}'),
        ("receipt", '{"order": 1e5000, "email": "secret@example"}'),
        ("strict", '{"' + "k" * 10_000 + '": 1}'),
    ],
    ids=lambda each: each[:40],
)
async def test_a_payload_that_does_not_decode_is_that_jobs_own_dead_letter(
    database: Database, conn: Connection[Record], handler: str, payload: str
) -> None:
    """Never the batch's failure, never a retry of what can't get better, and never in the clear in the error's text."""
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)) as node:
        async with conn.transaction():
            bad = await insert_job(conn, handler, payload)
            good = await insert_job(
                conn, "plain", '{"big": 123456789012345678901234567890, "deep": ' + "[" * 90 + "]" * 90 + "}"
            )
        assert await final_outcome(conn, bad) == "dead: bad_payload"
        assert await final_outcome(conn, good) == "succeeded"
        assert node.crash is None
    assert [value["big"] for value in seen] == [123456789012345678901234567890]
    dead = await dead_letter(conn, bad)
    assert dead["attempt"] == 1
    assert "secret" not in dead["error"]


async def test_meta_and_instants_that_no_codec_likes_harm_no_batch(
    database: Database, conn: Connection[Record]
) -> None:
    """What a client can write is decoded inside the attempt, if at all."""
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)) as node:
        job_id = await insert_job(
            conn,
            "plain",
            '{"n": 1}',
            meta="'{\"n\": 1e5000}'",
            run_at="timestamptz '1970-01-01 00:00:00+00'",
            idempotency_key="E'\\u2028\\n\"'",
            timeout="interval '1 microsecond'",
            max_attempts=1,
            lease="interval '1 day'",
            retry_for="interval '366 days'",
        )
        await final_outcome(conn, job_id)
        assert node.crash is None
        assert await final_outcome(conn, await insert_job(conn, "plain")) == "succeeded"


async def test_permanent_failures_are_buried_at_once(database: Database, conn: Connection[Record]) -> None:
    """rota.Permanent, and what the handler declares: no attempt is wasted on what can't work."""
    app = rota.App("permanent")

    @app.handler("says so")
    async def says_so(_: rota.Job[Any]) -> None:
        raise rota.Permanent("gone")

    @app.handler("declares it", permanent=(NoOrder,))
    async def declares_it(_: rota.Job[Any]) -> None:
        raise NoOrder("7")

    async with run_node(database.dsn, app):
        for handler in ("says so", "declares it"):
            job_id = await insert_job(conn, handler)
            assert await final_outcome(conn, job_id) == "dead: permanent"
            assert (await dead_letter(conn, job_id))["attempt"] == 1


async def test_retry_is_tried_again_when_the_handler_said(database: Database, conn: Connection[Record]) -> None:
    """after= and at= stand instead of the backoff, on the database's clock; the attempt counts."""
    app = rota.App("again")

    @app.handler("after")
    async def after(_: rota.Job[Any]) -> None:
        raise rota.Retry(after=timedelta(minutes=7))

    @app.handler("at")
    async def at(job: rota.Job[Any]) -> None:
        raise rota.Retry(at=job.scheduled_for + timedelta(days=1))

    @app.handler("bad wish", max_attempts=1)
    async def bad_wish(_: rota.Job[Any]) -> None:
        raise rota.Retry(after=timedelta(days=400))

    async with run_node(database.dsn, app) as node:
        first, second, third = [await insert_job(conn, handler) for handler in ("after", "at", "bad wish")]
        await node.wait_for_event("job.settled", job_id=first, settlement="retried")
        await node.wait_for_event("job.settled", job_id=second, settlement="retried")
        waits = await live_row(conn, first)
        assert waits["attempt"] == 1
        assert timedelta(minutes=6, seconds=50) < waits["run_at"] - waits["now"] <= timedelta(minutes=7)
        waits = await live_row(conn, second)
        assert waits["run_at"] == waits["scheduled_for"] + timedelta(days=1)
        assert await final_outcome(conn, third) == "dead: exhausted"


async def test_a_job_snoozed_thirty_times_stays_small_and_uses_no_attempt(
    database: Database, conn: Connection[Record]
) -> None:
    """History never grows inside the row, and beside it the last twenty are kept."""
    app = rota.App("snooze")

    @app.handler("snooze")
    async def snooze(_: rota.Job[Any]) -> None:
        raise rota.Snooze(after=timedelta(0))

    async with run_node(database.dsn, app, queues="default:1") as node:
        job_id = await insert_job(conn, "snooze")
        await node.wait_for_event(
            "job.settled", job_id=job_id, settlement="released", outcome="snoozed", times=30, within=20
        )
        await conn.execute("select rota.pause_queue('default')")
        await node.wait_for_turns("dispatcher")

        async def rests() -> bool:
            return bool((await live_row(conn, job_id))["state"] == "scheduled")

        await eventually(rests, what="the end of the snoozing")
        at_rest = await live_row(conn, job_id)
        assert at_rest["attempt"] == 0
        assert at_rest["releases"] >= 30
        size = await conn.fetchval("select pg_column_size(jobs) from rota.jobs where job_id = $1", job_id)
        assert size < 400
        assert len(await failed_attempts(conn, job_id)) == 20


async def test_a_job_that_fails_often_with_long_texts_keeps_a_short_history(
    database: Database, conn: Connection[Record]
) -> None:
    """B71: texts are cut at 8 KB, with the end kept, where the reason stands."""
    app = rota.App("long")

    @app.handler("long", max_attempts=25, backoff_base=timedelta(microseconds=1), backoff_cap=timedelta(microseconds=1))
    async def long(job: rota.Job[Any]) -> None:
        raise ValueError("x" * 100_000 + f" number {job.attempt}")

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "long")
        assert await final_outcome(conn, job_id, within=20) == "dead: exhausted"
    told = await failed_attempts(conn, job_id)
    assert len(told) <= 21
    assert all(len(a["error"].encode()) <= 8192 for a in told)
    assert told[-1]["error"].rstrip().endswith("number 25")


async def test_a_checkpoint_is_seen_by_this_attempt_and_the_next(database: Database, conn: Connection[Record]) -> None:
    """What was saved is what `job.checkpoint` says, at once and after a failure."""
    app = rota.App("checkpoints")
    seen: list[Any] = []

    @app.handler("step", backoff_base=timedelta(milliseconds=1), backoff_cap=timedelta(milliseconds=1))
    async def step(job: rota.Job[Any]) -> None:
        seen.append(job.checkpoint)
        if job.attempt == 1:
            await job.save_checkpoint({"done": 1})
            seen.append(job.checkpoint)
            await job.report_progress(0.5, "half way")
            raise ValueError("half way")

    @app.handler("step in a thread", backoff_base=timedelta(milliseconds=1), backoff_cap=timedelta(milliseconds=1))
    def step_in_a_thread(job: rota.SyncJob[Any]) -> None:
        seen.append(job.checkpoint)
        if job.attempt == 1:
            job.save_checkpoint({"done": 1})
            seen.append(job.checkpoint)
            job.report_progress(0.5, "half way")
            raise ValueError("half way")

    async with run_node(database.dsn, app):
        for handler in ("step", "step in a thread"):
            seen.clear()
            assert await final_outcome(conn, await insert_job(conn, handler)) == "succeeded"
            assert seen == [None, {"done": 1}, {"done": 1}]


async def test_a_dead_letter_calls_the_handler_that_was_configured_for_it(
    database: Database, conn: Connection[Record]
) -> None:
    """An alert that needs no Prometheus, inserted by the statement that buries; and its own death alerts nobody."""
    app = rota.App("alerts")
    alerts: list[Any] = []

    @app.handler("doomed", max_attempts=1)
    async def doomed(_: rota.Job[Any]) -> None:
        raise ValueError("doomed")

    @app.handler("alert", max_attempts=1)
    async def alert(job: rota.Job[Any]) -> None:
        alerts.append(job.payload)
        raise ValueError("the pager is broken")

    async with run_node(database.dsn, app, dead_letters__handler="alert") as node:
        job_id = await insert_job(conn, "doomed")
        await node.wait_for_event("job.settled", handler="alert", settlement="dead")
        await node.wait_for_turns("dispatcher")
    assert [(a["job_id"], a["reason"], a["error_kind"]) for a in alerts] == [(job_id, "exhausted", "ValueError")]


async def test_a_failed_attempt_says_which_it_was_what_happens_next_and_when_it_ends(
    database: Database, conn: Connection[Record]
) -> None:
    """Whoever reads the log at night must not have to compute it."""
    app = rota.App("fails")

    @app.handler("fails")
    async def fails(job: rota.Job[Any]) -> None:
        match job.payload:
            case "later":
                raise rota.Retry(at=datetime.now(UTC) + timedelta(seconds=500))
            case "too late":
                raise rota.Retry(at=datetime.now(UTC) + timedelta(days=3))
            case _:
                raise ValueError("boom")

    columns = {"max_attempts": 3, "backoff_base": "interval '100 s'"}
    async with run_node(database.dsn, app) as node:
        first = await insert_job(conn, "fails", **columns)
        told = await node.wait_for_event("job.settled", job_id=first)
        assert (told["settlement"], told["attempt"], told["max_attempts"], told["kind"]) == (
            "retried",
            1,
            3,
            "ValueError",
        )
        assert 50 <= told["due_in_s"] <= 100
        assert told["gives_up_in_s"] == pytest.approx(told["due_in_s"] + 200, abs=1)

        asked = await insert_job(conn, "fails", '"later"', **columns)
        told = await node.wait_for_event("job.settled", job_id=asked)
        assert told["due_in_s"] == pytest.approx(500, abs=10)
        assert told["gives_up_in_s"] == pytest.approx(told["due_in_s"] + 200, abs=1)

        limited = await insert_job(conn, "fails", **columns, retry_for="interval '150 s'")
        assert (await node.wait_for_event("job.settled", job_id=limited))["gives_up_in_s"] == pytest.approx(150, abs=10)

        last = await insert_job(conn, "fails", max_attempts=1)
        told = await node.wait_for_event("job.settled", job_id=last)
        assert (told["settlement"], told["reason"]) == ("dead", "exhausted")
        assert f"rota dead show {last}" in told["do"]

        never = await insert_job(conn, "fails", '"too late"', **columns, retry_for="interval '2 days'")
        told = await node.wait_for_event("job.settled", job_id=never)
        assert (told["settlement"], told["reason"]) == ("dead", "expired")
