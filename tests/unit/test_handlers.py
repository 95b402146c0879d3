"""What people declare: handlers, their payloads, what runs around them, and how they are waited for."""

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


def typed() -> tuple[rota.App, list[Any]]:
    """Return an app whose handlers keep what they were given."""
    app = rota.App("typed")
    seen: list[Any] = []

    @app.handler("receipt")
    async def receipt(job: rota.Job[Receipt]) -> int:
        seen.append(job.payload)
        return job.payload.order

    @app.handler("parcel")
    def parcel(job: rota.SyncJob[Parcel]) -> None:
        seen.append(job.payload)

    @app.handler("letter")
    async def letter(job: rota.Job[Letter]) -> None:
        seen.append(job.payload)

    @app.handler("nothing")
    async def nothing(job: rota.Job[None]) -> None:
        seen.append(job.payload)

    return app, seen


@pytest.mark.parametrize(
    ("name", "given", "got"),
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
async def test_a_payload_arrives_as_the_handlers_own_type(name: str, given: Any, got: Any) -> None:
    """Whatever a dataclass or a model holds beyond JSON comes back as what it was."""
    app, seen = typed()
    assert isinstance(await perform(app, name, given), Succeeded)
    assert seen == [got]


@pytest.mark.parametrize(
    ("name", "given", "where"),
    [
        ("receipt", {"order": "S3CRET"}, "order: int_parsing"),
        ("receipt", [1], "dataclass_type"),
        ("parcel", {"kilograms": 0}, "kilograms: greater_than"),
        ("letter", {}, "to: missing"),
    ],
)
async def test_what_does_not_decode_is_a_bad_payload_that_names_the_place_and_not_the_value(
    name: str, given: Any, where: str
) -> None:
    """The handler can't run, now or later; B103: what is wrong must be told without telling what it is."""
    app, seen = typed()
    outcome = await perform(app, name, given)
    assert isinstance(outcome, Undecodable)
    assert where in outcome.text
    assert "S3CRET" not in outcome.text
    assert not seen


def test_the_function_stays_a_function() -> None:
    """A handler is tested by calling it; nothing of rota is in the way."""
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
async def test_a_typed_enqueue_refuses_what_the_handler_could_not_decode(given: Any, message: str) -> None:
    """Better refused where it is written than buried where it would have run."""
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
def test_what_json_or_postgresql_can_not_keep_is_refused_with_the_path_to_it(value: Any, path: str) -> None:
    """B91, B93: from a dataclass as from a dict; a value must not arrive as another, or as null."""

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


def test_a_name_is_declared_once() -> None:
    """Two functions under one name would be told apart by the order of imports."""
    app, other = rota.App("a"), rota.App("b")

    @other.handler("theirs")
    async def theirs(job: rota.Job[Any]) -> None:
        """Do nothing."""

    app.include(other)
    with pytest.raises(ConfigError, match="'theirs' is declared twice in app 'a'"):
        app.handler("theirs")(theirs)
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
def test_a_handler_takes_the_job_and_nothing_else(function: Callable[..., Any], message: str) -> None:
    """Found when the module is imported, not when the first job comes."""
    with pytest.raises(ConfigError, match=message):
        rota.App("a").handler("h")(function)


async def test_middleware_runs_around_the_handler_the_first_one_outermost() -> None:
    """An included app's handlers run inside both apps' middleware; a thread's too, and it may change the result."""
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


async def test_what_middleware_raises_is_the_attempts_failure() -> None:
    """And what it swallows isn't."""
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


async def test_the_lifespan_is_the_jobs_state() -> None:
    """What it yields is there for every handler, and is left in the end."""
    from contextlib import asynccontextmanager

    left: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        yield "open"
        left.append("left")

    app = rota.App("a", lifespan=lifespan)

    @app.handler("state")
    async def state(job: rota.Job[Any]) -> Any:
        return job.state

    outcome = await perform(app, "state")
    assert isinstance(outcome, Succeeded)
    assert outcome.value == "open"
    assert left == ["left"]
    outcome = await perform(app, "state", state="given")
    assert isinstance(outcome, Succeeded)
    assert outcome.value == "given"
    assert left == ["left"]


async def test_a_wish_to_be_called_again_keeps_the_error_that_it_was_raised_from() -> None:
    """Or else a job that is given up after twenty such wishes doesn't say why; its payload's values are masked as ever."""
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
async def test_what_a_handler_raises_says_what_becomes_of_its_job(threaded: bool) -> None:
    """The same words in a coroutine and in a thread."""
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
async def test_a_handler_may_say_how_long_to_wait(backoff: Any, expected: list[timedelta | None]) -> None:
    """By attempt; the last delay of a list holds on. A function that fails leaves it to the job's own backoff."""
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
def test_a_backoff_that_means_nothing_is_refused_at_import(options: dict[str, Any]) -> None:
    """Nobody would notice it before the first failure."""
    with pytest.raises(ConfigError, match="backoff"):
        rota.App("a").handler("h", **options)


@pytest.mark.parametrize("permanent", [ValueError, ("ValueError",), "ValueError"])
def test_a_permanent_that_is_no_tuple_of_types_is_refused_at_import(permanent: Any) -> None:
    """Nobody would notice it before the first failure, which it would turn into the daemon's."""
    with pytest.raises(ConfigError, match="permanent"):
        rota.App("a").handler("h", permanent=permanent)


def test_a_lost_attempt_is_retried_by_the_lists_own_figures() -> None:
    """Another node's reaper can't ask, but it reads the row."""
    app = rota.App("a")

    @app.handler("h", backoff=[timedelta(seconds=2), timedelta(seconds=9), timedelta(seconds=4)])
    async def h(job: rota.Job[Any]) -> None:
        """Do nothing."""

    assert (app.handlers["h"].backoff_base, app.handlers["h"].backoff_cap) == (
        timedelta(seconds=2),
        timedelta(seconds=9),
    )


async def test_a_made_up_job_notes_what_is_asked_of_it() -> None:
    """So that a test can look at it, and the handler needs no database."""
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


async def test_a_handler_that_completes_its_own_job_has_committed() -> None:
    """`perform` says so, as a daemon would."""
    app = rota.App("a")

    @app.handler("own")
    async def own(job: rota.Job[Any]) -> None:
        await job.complete(None, 1)  # type: ignore[arg-type]

    assert await perform(app, "own") == Committed()


async def test_an_unknown_handler_is_refused_with_the_closest_name() -> None:
    """A slip in a test, or on the command line."""
    app, _ = typed()
    with pytest.raises(ConfigError, match="did you mean 'receipt'"):
        await perform(app, "reciept")


@pytest.mark.parametrize("threaded", [False, True])
async def test_log_records_inside_a_handler_carry_its_job(
    threaded: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it nobody can tell which of a hundred jobs a line is about; in threads and tasks of the handler's, too."""
    app = rota.App("a")
    logger = logging.getLogger("theirs")

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
    said, outside = caplog.records
    assert (said.job_id, said.handler, said.attempt, said.schedule) == (7, "say", 2, "nightly")  # type: ignore[attr-defined]
    assert said.queue == "their own"  # type: ignore[attr-defined]
    assert not hasattr(outside, "job_id")
    line = capsys.readouterr().out
    for word in ("job_id", "7", "handler", "say", "queue", "attempt", "schedule", "nightly"):
        assert word in line


def test_a_root_logger_that_the_app_has_configured_is_left_alone() -> None:
    """Their format, their level, their handlers; without any, lines would go nowhere, so it gets one, for as long as we run."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    assert handlers, "pytest's own"
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
