"""Outcomes: whatever a handler raises or returns affects its own job only."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, ledger_rows, live_row, run_node
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection, Record

    from servers import Database


class RaisesOnName(type):
    """A metaclass whose classes raise an error when asked for their name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # that is the oddity
        raise ValueError("no name")


class NamelessError(Exception, metaclass=RaisesOnName):
    """An exception whose type has no readable name."""


class UnprintableError(Exception):
    """An exception whose text raises an error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Abort(BaseException):
    """A BaseException, as some libraries raise it to get past `except Exception`."""


class NoOrder(Exception):
    """An exception that a handler declares as permanent."""


class SnoozeWithoutInit(rota.Snooze):
    """A Snooze that never called super().__init__."""

    def __init__(self) -> None:
        self.args = ()


class CancelWithoutInit(rota.Cancel):
    """A Cancel that never called super().__init__."""

    def __init__(self) -> None:
        self.args = ()


class OddKey:
    """A dictionary key whose text raises an error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> None:
    raise error


def _recurse() -> None:
    _recurse()


RAISES: dict[str, Callable[[], Any]] = {
    "CancelledError": lambda: _raise(asyncio.CancelledError("mine")),
    "TimeoutError": lambda: _raise(TimeoutError("mine")),
    "SystemExit": lambda: _raise(SystemExit(3)),
    "KeyError": lambda: _raise(KeyError("nul \x00 and \udcff lone surrogate")),
    "ValueError": lambda: _raise(ValueError("x" * 5_000_000)),
    "UnprintableError": lambda: _raise(UnprintableError()),
    "RecursionError": _recurse,
    "ExceptionGroup": lambda: _raise(ExceptionGroup("several", [ValueError("one"), UnprintableError()])),
    "Abort": lambda: _raise(Abort("past except Exception")),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "StopIteration": lambda: next(iter(())),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "NamelessError": lambda: _raise(NamelessError()),
    "SnoozeWithoutInit": lambda: _raise(SnoozeWithoutInit()),
    "CancelWithoutInit": lambda: _raise(CancelWithoutInit()),
}

KINDS = {"StopIteration": "RuntimeError", "SnoozeWithoutInit": "AttributeError", "CancelWithoutInit": "AttributeError"}
"""The kinds that differ: Python turns a StopIteration that leaves a coroutine into a RuntimeError."""


def odd_app() -> rota.App:
    """An app whose handlers call a function of RAISES, and a plain handler beside them."""
    app = rota.App("odd")

    @app.handler("odd", max_attempts=1)
    async def odd(job: rota.Job[Any]) -> None:
        RAISES[job.payload["raises"]]()

    @app.handler("odd in a thread", max_attempts=1)
    def odd_in_a_thread(job: rota.SyncJob[Any]) -> None:
        RAISES[job.payload["raises"]]()

    @app.handler("odd after its timeout", max_attempts=1, timeout=timedelta(milliseconds=50))
    async def odd_after_its_timeout(job: rota.Job[Any]) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        RAISES[job.payload["raises"]]()

    @app.handler("odd in a thread after its timeout", max_attempts=1, timeout=timedelta(milliseconds=50))
    def odd_in_a_thread_after_its_timeout(job: rota.SyncJob[Any]) -> None:
        job.wait_for_stop(timedelta(seconds=10))
        RAISES[job.payload["raises"]]()

    @app.handler("plain")
    async def plain(job: rota.Job[Any]) -> Any:
        return job.payload

    return app


@pytest.mark.parametrize("handler", ["odd", "odd in a thread"])
async def test_any_exception_of_a_handler_fails_only_its_own_job(
    database: Database, conn: Connection[Record], handler: str
) -> None:
    """The error is stored with a text of at most 8 KB, whatever the exception is."""
    async with run_node(database.dsn, odd_app()) as node:
        jobs = {name: await insert_job(conn, handler, f'{{"raises": "{name}"}}') for name in RAISES}
        for name, job_id in jobs.items():
            assert await final_outcome(conn, job_id) == "dead: exhausted", name
            (attempt,) = await failed_attempts(conn, job_id)
            assert attempt["outcome"] == "failed"
            assert len(attempt["error"].encode()) <= 8192
            assert attempt["error_kind"] == KINDS.get(name, name)
        after = await insert_job(conn, "plain")
        assert await final_outcome(conn, after) == "succeeded"
        assert node.crash is None


@pytest.mark.parametrize("handler", ["odd after its timeout", "odd in a thread after its timeout"])
async def test_any_exception_after_an_interruption_ends_only_its_own_job(
    database: Database, conn: Connection[Record], handler: str
) -> None:
    async with run_node(database.dsn, odd_app()) as node:
        jobs = [await insert_job(conn, handler, f'{{"raises": "{name}"}}') for name in RAISES]
        for name, job_id in zip(RAISES, jobs, strict=True):
            assert (await final_outcome(conn, job_id)).startswith("dead"), name
        assert await final_outcome(conn, await insert_job(conn, "plain")) == "succeeded"
        assert node.crash is None


async def test_a_handler_that_cancels_its_own_task_fails_and_is_retried(
    database: Database, conn: Connection[Record]
) -> None:
    """The error says so, and the lease is not lost."""
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
async def test_a_cancel_ends_the_job_whatever_type_or_text_its_reason_has(
    database: Database, conn: Connection[Record], reason: Any
) -> None:
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


def _circular_list() -> list[Any]:
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
    "circular": _circular_list,
    "an odd key": lambda: {OddKey(): 1},
}


async def test_results_that_cannot_be_stored_are_dropped_and_all_jobs_of_the_batch_succeed(
    database: Database, conn: Connection[Record]
) -> None:
    """The work is done by then, so a bad result must not cause a retry."""
    app = rota.App("results")
    all_there = asyncio.Barrier(len(RESULTS))

    @app.handler("return")
    async def return_result(job: rota.Job[Any]) -> Any:
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


async def test_permanent_failures_become_dead_letters_without_a_retry(
    database: Database, conn: Connection[Record]
) -> None:
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


async def test_retry_sets_the_time_of_the_next_attempt_and_uses_an_attempt(
    database: Database, conn: Connection[Record]
) -> None:
    """after= and at= replace the backoff; an invalid value fails the attempt."""
    app = rota.App("again")

    @app.handler("after")
    async def after(_: rota.Job[Any]) -> None:
        raise rota.Retry(after=timedelta(minutes=7))

    @app.handler("at")
    async def at(job: rota.Job[Any]) -> None:
        raise rota.Retry(at=job.scheduled_for + timedelta(days=1))

    @app.handler("invalid delay", max_attempts=1)
    async def invalid_delay(_: rota.Job[Any]) -> None:
        raise rota.Retry(after=timedelta(days=400))

    async with run_node(database.dsn, app) as node:
        first, second, third = [await insert_job(conn, handler) for handler in ("after", "at", "invalid delay")]
        await node.wait_for_event("job.settled", job_id=first, settlement="retried")
        await node.wait_for_event("job.settled", job_id=second, settlement="retried")
        row = await live_row(conn, first)
        assert row["attempt"] == 1
        assert timedelta(minutes=6, seconds=50) < row["run_at"] - row["now"] <= timedelta(minutes=7)

        row = await live_row(conn, second)
        assert row["run_at"] == row["scheduled_for"] + timedelta(days=1)
        assert await final_outcome(conn, third) == "dead: exhausted"


async def test_a_job_snoozed_thirty_times_stays_small_and_uses_no_attempt(
    database: Database, conn: Connection[Record]
) -> None:
    """The row does not grow, and the last 20 attempts are kept in rota.attempts."""
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

        async def is_scheduled() -> bool:
            return bool((await live_row(conn, job_id))["state"] == "scheduled")

        await eventually(is_scheduled, what="the end of the snoozing")
        snoozed = await live_row(conn, job_id)
        assert snoozed["attempt"] == 0
        assert snoozed["releases"] >= 30

        size = await conn.fetchval("select pg_column_size(jobs) from rota.jobs where job_id = $1", job_id)
        assert size < 400
        assert len(await failed_attempts(conn, job_id)) == 20


async def test_b71_long_error_texts_are_cut_and_only_the_last_attempts_are_kept(
    database: Database, conn: Connection[Record]
) -> None:
    """A text is cut to 8 KB at its start, because the reason is usually at the end."""
    app = rota.App("long")

    @app.handler("long", max_attempts=25, backoff_base=timedelta(microseconds=1), backoff_cap=timedelta(microseconds=1))
    async def long(job: rota.Job[Any]) -> None:
        raise ValueError("x" * 100_000 + f" number {job.attempt}")

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "long")
        assert await final_outcome(conn, job_id, within=20) == "dead: exhausted"
    event = await failed_attempts(conn, job_id)

    assert len(event) <= 21
    assert all(len(a["error"].encode()) <= 8192 for a in event)
    assert event[-1]["error"].rstrip().endswith("number 25")


async def test_a_saved_checkpoint_is_visible_to_this_attempt_and_the_next(
    database: Database, conn: Connection[Record]
) -> None:
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


async def test_a_dead_letter_enqueues_the_configured_handler_once(database: Database, conn: Connection[Record]) -> None:
    """A dead letter of that handler itself does not enqueue another job."""
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


async def test_a_failed_attempt_logs_its_number_the_next_retry_and_the_final_deadline(
    database: Database, conn: Connection[Record]
) -> None:
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
        event = await node.wait_for_event("job.settled", job_id=first)
        assert (event["settlement"], event["attempt"], event["max_attempts"], event["kind"]) == (
            "retried",
            1,
            3,
            "ValueError",
        )
        assert 50 <= event["due_in_s"] <= 100
        assert event["gives_up_in_s"] == pytest.approx(event["due_in_s"] + 200, abs=1)

        explicit_time = await insert_job(conn, "fails", '"later"', **columns)
        event = await node.wait_for_event("job.settled", job_id=explicit_time)
        assert event["due_in_s"] == pytest.approx(500, abs=10)
        assert event["gives_up_in_s"] == pytest.approx(event["due_in_s"] + 200, abs=1)

        time_limited = await insert_job(conn, "fails", **columns, retry_for="interval '150 s'")
        assert (await node.wait_for_event("job.settled", job_id=time_limited))["gives_up_in_s"] == pytest.approx(
            150, abs=10
        )

        last = await insert_job(conn, "fails", max_attempts=1)
        event = await node.wait_for_event("job.settled", job_id=last)
        assert (event["settlement"], event["reason"]) == ("dead", "exhausted")
        assert f"rota dead show {last}" in event["do"]

        past_limit = await insert_job(conn, "fails", '"too late"', **columns, retry_for="interval '2 days'")
        event = await node.wait_for_event("job.settled", job_id=past_limit)
        assert (event["settlement"], event["reason"]) == ("dead", "expired")
