"""Handlers, their payloads, middleware, lifespan and backoff."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
import structlog
from typing_extensions import TypedDict

import rota
from rota.errors import ConfigError, InvalidPayload
from rota.observability import logs
from rota.testing import (
    Cancelled,
    Committed,
    Failed,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
    make_job,
    make_sync_job,
    perform,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@dataclass
class Receipt:
    """A dataclass."""

    order: int
    at: datetime | None = None


class Parcel(pydantic.BaseModel):
    """A model with an alias and a rule."""

    weight: int = pydantic.Field(gt=0, alias="kilograms")


class Letter(TypedDict):
    """A typed dict."""

    to: str


def make_typed_app() -> tuple[rota.App, list[Any]]:
    """Return an app whose handlers record their payloads, and the list of recorded payloads."""
    app = rota.App("typed")
    payloads: list[Any] = []

    @app.handler("receipt")
    async def receipt(job: rota.Job[Receipt]) -> int:
        payloads.append(job.payload)
        return job.payload.order

    @app.handler("parcel")
    def parcel(job: rota.SyncJob[Parcel]) -> None:
        payloads.append(job.payload)

    @app.handler("letter")
    async def letter(job: rota.Job[Letter]) -> None:
        payloads.append(job.payload)

    @app.handler("nothing")
    async def nothing(job: rota.Job[None]) -> None:
        payloads.append(job.payload)

    return app, payloads


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("receipt", {"order": 7}, Receipt(7)),
        (
            "receipt",
            Receipt(7, datetime(2026, 1, 31, 8, tzinfo=UTC)),
            Receipt(7, datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ),
        ("parcel", {"kilograms": 3}, Parcel(kilograms=3)),
        ("parcel", Parcel(kilograms=3), Parcel(kilograms=3)),
        ("letter", {"to": "a"}, {"to": "a"}),
        ("nothing", None, None),
        ("nothing", {"left": "over"}, None),
    ],
)
async def test_a_payload_arrives_as_the_handlers_own_type(name: str, given: Any, expected: Any) -> None:
    app, payloads = make_typed_app()
    assert isinstance(await perform(app, name, given), Succeeded)
    assert payloads == [expected]


@pytest.mark.parametrize(
    ("name", "given", "where"),
    [
        ("receipt", {"order": "S3CRET"}, "order: int_parsing"),
        ("receipt", [1], "dataclass_type"),
        ("parcel", {"kilograms": 0}, "kilograms: greater_than"),
        ("letter", {}, "to: missing"),
    ],
)
async def test_the_error_for_an_undecodable_payload_names_the_path_and_no_value(
    name: str, given: Any, where: str
) -> None:
    app, payloads = make_typed_app()
    outcome = await perform(app, name, given)
    assert isinstance(outcome, Undecodable)
    assert where in outcome.text
    assert "S3CRET" not in outcome.text
    assert not payloads


def test_a_decorated_handler_can_be_called_like_the_function() -> None:
    app = rota.App("plain")

    @app.handler("double", queue="q")
    async def double(job: rota.Job[int]) -> int:
        """Double it."""
        return job.payload * 2

    @app.handler("halve")
    def halve(job: rota.SyncJob[int]) -> float:
        return job.payload / 2

    assert asyncio.run(double(make_job(21))) == 42
    assert halve(make_sync_job(21)) == 10.5
    assert (double.name, double.__name__, double.__doc__) == ("double", "double", "Double it.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Receipt("x"), "is no Receipt"),  # type: ignore[arg-type]
        ({"order": 7}, "is no Receipt, but a dict"),
        (None, "is no Receipt"),
    ],
)
async def test_a_typed_enqueue_refuses_a_payload_of_the_wrong_type(given: Any, message: str) -> None:
    app = rota.App("typed")

    @app.handler("receipt")
    async def receipt(job: rota.Job[Receipt]) -> None:
        """Do nothing."""

    with pytest.raises(InvalidPayload, match=message):
        await receipt.enqueue(None, given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), r"\$\.n: n"),
        (float("inf"), r"\$\.n: (inf|n)"),
        ("\ud800", r"\$\.n: a lone surrogate"),
        ("a\0", r"\$\.n: a NUL"),
    ],
)
def test_values_that_json_can_not_store_are_refused_with_their_path(value: Any, path: str) -> None:
    """Such a value must not arrive as another value or as null."""

    @dataclass
    class Odd:
        n: Any

    app = rota.App("odd")

    @app.handler("odd")
    async def odd(job: rota.Job[Odd]) -> None:
        """Do nothing."""

    for given in (Odd(value), {"n": value}):
        with pytest.raises(InvalidPayload, match=path):
            rota.client.encode_payload(given)
    with pytest.raises(InvalidPayload, match=path):
        app.handlers["odd"].codec.encode(Odd(value))


def test_a_handler_name_is_declared_only_once() -> None:
    """Also holds for apps that include each other."""
    app, other = rota.App("a"), rota.App("b")

    @other.handler("library")
    async def theirs(job: rota.Job[Any]) -> None:
        """Do nothing."""

    app.include(other)
    with pytest.raises(ConfigError, match="'library' is declared twice in app 'a'"):
        app.handler("library")(theirs)
    app.handler("mine")(theirs)
    with pytest.raises(ConfigError, match="'mine' is declared twice in app 'a'"):
        other.handler("mine")(theirs)
    with pytest.raises(ConfigError, match="both declare"):
        app.include(other)
    with pytest.raises(ConfigError, match="lifespan"):
        app.include(rota.App("c", lifespan=lambda: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="itself"):
        app.include(app)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "exactly one argument"),
        (lambda _, __: None, "exactly one argument"),
    ],
)
def test_a_handler_must_take_exactly_one_argument(function: Callable[..., Any], message: str) -> None:
    """The error is raised at import, not at the first job."""
    with pytest.raises(ConfigError, match=message):
        rota.App("a").handler("h")(function)


async def test_middleware_runs_around_the_handler_with_the_first_one_outermost() -> None:
    """Handlers of an included app run inside the middleware of both apps."""
    app, other = rota.App("a"), rota.App("b")
    order: list[Any] = []

    @app.middleware
    async def outer(job: rota.Job[Any], call_next: Any) -> Any:
        order.append(("outer", job.payload))
        try:
            return await call_next(job)
        finally:
            order.append("left outer")

    @app.middleware
    async def second(job: rota.Job[Any], call_next: Any) -> Any:
        order.append("second")
        return [await call_next(job)]

    @other.handler("work")
    def work(job: rota.SyncJob[int]) -> int:
        order.append(threading.current_thread() is threading.main_thread())
        return job.payload

    app.include(other)

    @other.middleware
    async def inner(job: rota.Job[Any], call_next: Any) -> Any:
        order.append("inner")
        return await call_next(job)

    outcome = await perform(app, "work", 7)
    assert isinstance(outcome, Succeeded)
    assert outcome.value == [7]
    assert order == [("outer", 7), "second", "inner", False, "left outer"]
    assert isinstance(await perform(other, "work", 7), Succeeded)
    assert order[5:] == ["inner", False]
    with pytest.raises(ConfigError, match="async def"):
        app.middleware(lambda _, __: None)  # type: ignore[type-var]


async def test_an_error_raised_by_middleware_fails_the_attempt() -> None:
    """An error that middleware catches does not."""
    app = rota.App("a")

    @app.middleware
    async def strict(job: rota.Job[Any], call_next: Any) -> Any:
        if job.payload == "refused":
            raise rota.Permanent("no")
        try:
            return await call_next(job)
        except ValueError:
            return "caught"

    @app.handler("fail")
    async def fail(_: rota.Job[Any]) -> None:
        raise ValueError

    refused, caught = await perform(app, "fail", "refused"), await perform(app, "fail", "x")
    assert isinstance(refused, Failed)
    assert refused.permanent
    assert isinstance(caught, Succeeded)
    assert caught.value == "caught"


async def test_the_value_of_the_lifespan_is_available_as_job_state() -> None:
    """`perform` enters and leaves the lifespan, unless the test gives a state."""
    from contextlib import asynccontextmanager

    exited: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        yield "open"
        exited.append("exited")

    app = rota.App("a", lifespan=lifespan)

    @app.handler("state")
    async def state(job: rota.Job[Any]) -> Any:
        return job.state

    outcome = await perform(app, "state")
    assert isinstance(outcome, Succeeded)
    assert outcome.value == "open"
    assert exited == ["exited"]
    outcome = await perform(app, "state", state="given")
    assert isinstance(outcome, Succeeded)
    assert outcome.value == "given"
    assert exited == ["exited"]


async def test_retry_keeps_the_text_of_the_error_it_was_raised_from() -> None:
    """Otherwise the dead letter of a job that always raises Retry would not show the cause."""
    app = rota.App("a")

    @app.handler("h")
    async def h(job: rota.Job[Any]) -> None:
        error = ConnectionError(f"no answer for {job.payload['who']}")
        if job.payload["how"] == "from":
            raise rota.Retry(after=timedelta(0)) from error
        try:
            raise error
        except ConnectionError as caught:
            if job.payload["how"] == "inside":
                raise rota.Retry(after=timedelta(0))  # noqa: B904  what is tested
            raise rota.Retry(after=timedelta(0)) from (caught if job.payload["how"] == "caught" else None)

    for how in ("from", "inside", "caught", "from none"):
        outcome = await perform(app, "h", {"how": how, "who": "somebody"})
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.permanent) == ("Retry", False)
        assert ("ConnectionError: no answer for ***" in outcome.text) is (how != "from none")


@pytest.mark.parametrize("threaded", [False, True])
async def test_the_exception_that_a_handler_raises_decides_the_outcome(threaded: bool) -> None:
    """The same exceptions work in coroutines and in threads."""
    app = rota.App("a")
    raised: dict[str, BaseException] = {
        "permanent": rota.Permanent("no"),
        "declared": KeyError("x"),
        "retry": rota.Retry(after=timedelta(seconds=9)),
        "snooze": rota.Snooze(after=timedelta(seconds=9)),
        "cancel": rota.Cancel("moot"),
        "exit": SystemExit(3),
        "other": ValueError("why"),
    }

    def fail(job: Any) -> None:
        raise raised[job.payload]

    async def fail_on_loop(job: rota.Job[str]) -> None:
        fail(job)

    app.handler("fail", permanent=(KeyError,))(fail if threaded else fail_on_loop)
    outcomes = {name: await perform(app, "fail", name) for name in raised}
    assert outcomes["snooze"] == Snoozed(timedelta(seconds=9), None)
    assert outcomes["cancel"] == Cancelled("moot")
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failed)}
    assert {name: outcome.permanent for name, outcome in failed.items()} == {
        "permanent": True,
        "declared": True,
        "retry": False,
        "exit": False,
        "other": False,
    }
    assert failed["retry"].after == timedelta(seconds=9)
    assert failed["other"].kind == "ValueError"


DELAYS = [timedelta(seconds=1), timedelta(minutes=5)]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (DELAYS, [DELAYS[0], DELAYS[1], DELAYS[1]]),
        (tuple(DELAYS), [DELAYS[0], DELAYS[1], DELAYS[1]]),
        (lambda attempt: timedelta(seconds=attempt), [timedelta(seconds=n) for n in (1, 2, 3)]),
        (lambda attempt: timedelta(days=-attempt), [timedelta(0)] * 3),
        (lambda _: timedelta(days=400), [timedelta(days=366)] * 3),
        (lambda _: 1 / 0, [None] * 3),
        (lambda _: "soon", [None] * 3),
    ],
)
async def test_a_handlers_backoff_decides_the_delay_of_each_retry(
    backoff: Any, expected: list[timedelta | None]
) -> None:
    """The last delay of a list repeats. If a backoff function fails, the job's own backoff applies."""
    app = rota.App("a")

    @app.handler("fail", backoff=backoff)
    async def fail(job: rota.Job[Any]) -> None:
        if job.payload == "sleep":
            await asyncio.Event().wait()
        raise rota.Permanent("no") if job.payload == "permanent" else ValueError

    @app.handler("retry", backoff=backoff)
    async def retry(_: rota.Job[Any]) -> None:
        raise rota.Retry(after=timedelta(seconds=7))

    for attempt, delay in enumerate(expected, 1):
        outcome = await perform(app, "fail", attempt=attempt)
        assert isinstance(outcome, Failed)
        assert outcome.after == delay
        late = await perform(app, "fail", "sleep", attempt=attempt, timeout=timedelta(milliseconds=1))
        assert late == TimedOut(timedelta(milliseconds=1), delay)
    own = await perform(app, "retry")
    assert isinstance(own, Failed)
    assert own.after == timedelta(seconds=7)
    given_up = await perform(app, "fail", "permanent")
    assert isinstance(given_up, Failed)
    assert given_up.after is None


@pytest.mark.parametrize(
    "options",
    [
        {"backoff": []},
        {"backoff": [5]},
        {"backoff": [timedelta(0)]},
        {"backoff": "1s"},
        {"backoff": DELAYS, "backoff_base": timedelta(seconds=1)},
        {"backoff": lambda _: timedelta(0), "backoff_cap": timedelta(seconds=1)},
    ],
)
def test_an_invalid_backoff_is_refused_at_import(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="backoff"):
        rota.App("a").handler("h", **options)


@pytest.mark.parametrize("permanent", [ValueError, ("ValueError",), "ValueError"])
def test_permanent_must_be_a_tuple_of_exception_types(permanent: Any) -> None:
    """Otherwise the first failure of a job would raise a TypeError in the daemon."""
    with pytest.raises(ConfigError, match="permanent"):
        rota.App("a").handler("h", permanent=permanent)


def test_a_backoff_list_is_stored_as_base_and_cap_for_lost_attempts() -> None:
    """The reaper of another node cannot call the handler, so it reads the row."""
    app = rota.App("a")

    @app.handler("h", backoff=[timedelta(seconds=2), timedelta(seconds=9), timedelta(seconds=4)])
    async def h(job: rota.Job[Any]) -> None:
        """Do nothing."""

    assert (app.handlers["h"].backoff_base, app.handlers["h"].backoff_cap) == (
        timedelta(seconds=2),
        timedelta(seconds=9),
    )


async def test_a_test_job_records_the_calls_of_its_handler() -> None:
    job = make_job({"n": 1}, attempt=3, checkpoint={"done": 2}, meta={"tenant": 7}, schedule="nightly", queue="q")
    assert (job.attempt, job.checkpoint, job.meta, job.schedule, job.queue) == (
        3,
        {"done": 2},
        {"tenant": 7},
        "nightly",
        "q",
    )
    await job.save_checkpoint({"done": 3})
    await job.report_progress(0.5, "half")
    await job.guard(None, "order:7")  # type: ignore[arg-type]
    await job.complete(None, {"ok": True})  # type: ignore[arg-type]
    assert (job.checkpoint, job.progress, job.progress_note) == ({"done": 3}, 0.5, "half")
    assert (job.guarded, job.completed, job.result) == (["order:7"], True, {"ok": True})
    job.stop("drain")
    assert (job.stop_requested, job.stop_reason) == (True, "drain")
    with pytest.raises(RuntimeError, match="conn="):
        async with make_job(None).transaction():
            pytest.fail("there is no database")
    sync = make_sync_job(1)
    sync.save_checkpoint(1)
    sync.report_progress(1)
    sync.guard(None, "r")  # type: ignore[arg-type]
    sync.complete(None)  # type: ignore[arg-type]
    assert (sync.checkpoint, sync.progress, sync.guarded, sync.completed) == (1, 1, ["r"], True)


async def test_perform_reports_committed_when_the_handler_completes_its_job() -> None:
    app = rota.App("a")

    @app.handler("own")
    async def own(job: rota.Job[Any]) -> None:
        await job.complete(None, 1)  # type: ignore[arg-type]

    assert await perform(app, "own") == Committed()


async def test_the_error_for_an_unknown_handler_suggests_the_closest_name() -> None:
    app, _ = make_typed_app()
    with pytest.raises(ConfigError, match="did you mean 'receipt'"):
        await perform(app, "reciept")


@pytest.mark.parametrize("threaded", [False, True])
async def test_log_records_inside_a_handler_carry_the_job_id(
    threaded: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers threads and tasks that the handler starts."""
    app = rota.App("a")
    logger = logging.getLogger("library")

    def say() -> None:
        logger.warning("standard", extra={"queue": "their own"})
        structlog.get_logger().warning("structured")

    async def on_loop(_: rota.Job[Any]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(say))

    def in_thread(_: rota.SyncJob[Any]) -> None:
        say()

    app.handler("say")(in_thread if threaded else on_loop)
    with logs.installed(level="info", format="json"):
        await perform(app, "say", job_id=7, attempt=2, queue="q", schedule="nightly")
        logger.warning("outside")
    record, outside = caplog.records
    assert (record.job_id, record.handler, record.attempt, record.schedule) == (7, "say", 2, "nightly")  # type: ignore[attr-defined]
    assert record.queue == "their own"  # type: ignore[attr-defined]
    assert not hasattr(outside, "job_id")
    line = capsys.readouterr().out
    for word in ("job_id", "7", "handler", "say", "queue", "attempt", "schedule", "nightly"):
        assert word in line


def test_a_root_logger_configured_by_the_app_is_not_changed() -> None:
    """An unconfigured root logger gets a handler while the daemon runs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    assert handlers, "pytest installs a handler"
    with logs.installed(level="debug", format="json"):
        assert (root.handlers, root.level) == (handlers, level)
    for handler in handlers:
        root.removeHandler(handler)
    try:
        with logs.installed(level="info", format="json"):
            assert len(root.handlers) == 1
        assert not root.handlers
    finally:
        for handler in handlers:
            root.addHandler(handler)
