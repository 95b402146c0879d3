"""A value of the wrong type is refused with the name of its parameter, for every parameter."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import rota
from rota import client, inline, testing
from rota.client.columns import COLUMNS, Columns, option
from rota.client.many import ManyJobs
from rota.errors import ConfigError
from rota.testing import make_job, make_sync_job, perform

if TYPE_CHECKING:
    from collections.abc import Callable

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001  that is what is refused

TEXT = (5, True, b"x", object())
COUNT = ("5", 5.0, True, timedelta(1))
DURATION = (30, "30", 1.5, True)
INSTANT = ("tomorrow", 5, date(2030, 1, 1), NAIVE)
OBJECT = (5, "x", [("a", 1)])
FLAG = ("no", 0, 1)
CHOICE = (5, True, ["skip"])

KINDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("name", "queue", "handler", "timezone", "description", "owner", "unique_key", "idempotency_key", "limit_key", "schedule",
         "cron"),
        TEXT,
    ),
    **dict.fromkeys(
        ("delivery", "misfire", "overlap", "dst_gap", "dst_fold", "on_conflict", "runs_in"), CHOICE
    ),
    **dict.fromkeys(("max_attempts", "priority", "catch_up_limit", "max_running", "max_starts"), COUNT),
    **dict.fromkeys(("job_id", "attempt", "fence_token", "schedule_id", "count", "limit"), COUNT),
    **dict.fromkeys(
        ("every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within",
         "too_late_after", "jitter", "expect_success_within", "per"),
        DURATION,
    ),
    **dict.fromkeys(("start_at", "end_at", "run_at", "start_by", "scheduled_for"), INSTANT),
    **dict.fromkeys(("paused", "at_once"), FLAG),
    "meta": OBJECT,
    "backoff": (30, "30", [30], [], timedelta(seconds=30)),
    "permanent": (ValueError, "ValueError", (5,), (int,)),
}  # fmt: skip

FREE = {"self", "payload", "conn", "state", "columns", "facts", "checkpoint", "app", "encode", "payloads"}
"""Parameters that take any value, or have a test of their own below."""


def checked_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, except those that take any value."""
    return sorted(set(inspect.signature(function).parameters) - FREE)


def declare_with(function: Callable[..., Any], name: str, value: Any) -> None:
    """Call a declaration with one wrong value."""
    given = {"name": "n", "cron": "0 6 * * *"} | {name: value}
    if name == "every":
        del given["cron"]
    function(**{key: each for key, each in given.items() if key in inspect.signature(function).parameters})


@pytest.mark.parametrize("name", checked_parameters(rota.App.handler))
def test_each_wrong_handler_argument_is_refused_by_name(name: str) -> None:
    for value in KINDS[name]:
        with pytest.raises(ConfigError, match=rf"{name}\b.*(write|choose|must be)"):
            declare_with(rota.App("a").handler, name, value)


@pytest.mark.parametrize("name", checked_parameters(rota.App.schedule))
def test_each_wrong_schedule_argument_is_refused_by_name(name: str) -> None:
    for value in KINDS[name]:
        with pytest.raises(ConfigError, match=rf"{name}\b.*(write|choose)"):
            declare_with(rota.App("a").schedule, name, value)


@asynccontextmanager
async def _lifespan() -> Any:
    yield


async def _bare() -> Any:
    yield


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"release": 5}, "release = 5: write a text"),
        ({"lifespan": 5}, "lifespan = 5: write a function that returns a context manager"),
        ({"lifespan": _lifespan()}, "lifespan was called: write lifespan="),
        ({"lifespan": _bare}, "put @asynccontextmanager above"),
    ],
)
def test_each_wrong_app_argument_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rota.App("a", **given)


def test_decorators_and_include_refuse_unusable_arguments() -> None:
    """The error contains the name of the handler or the app."""
    app: Any = rota.App("a")
    with pytest.raises(ConfigError, match="handler 'h' must be a function"):
        app.handler("h")(5)
    with pytest.raises(ConfigError, match="middleware 5 must be an async def"):
        app.middleware(5)
    with pytest.raises(ConfigError, match=r"app 'a' can't include a str: write a rota.App"):
        app.include("b")


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_each_wrong_job_option_of_enqueue_is_refused_by_name(name: str) -> None:
    """All enqueue functions share this check."""
    assert name in Columns.__annotations__
    for value in KINDS[name]:
        with pytest.raises((TypeError, ValueError), match=rf"{name} (can't be|must have).*(write|datetime\.now)"):
            option(name, value)


@pytest.mark.parametrize("value", [30, "30"])
def test_enqueue_many_refuses_wrong_values_of_single_jobs(value: Any) -> None:
    """Covers values that a function of the payload returns."""
    with pytest.raises(TypeError, match=r"timeout can't be a .*: write a timedelta"):
        ManyJobs("h", [1], {"timeout": value}, client.encode_payload)
    many = ManyJobs("h", [{"n": 1}], {"run_at": lambda _: value}, client.encode_payload)
    with pytest.raises(TypeError, match=r"run_at can't be a .*: write a datetime"):
        list(many.statements())


@pytest.mark.parametrize("payloads", [{"order": 7}, "text", b"bytes", 5, None])
def test_enqueue_many_refuses_a_dict_as_list_of_payloads(payloads: Any) -> None:
    """A dict would become one job per key."""
    with pytest.raises(TypeError, match=r"payloads can't be a .*: write a list of payloads"):
        ManyJobs("h", payloads, {}, client.encode_payload)


def test_encode_must_be_a_function_that_returns_text() -> None:
    """Some JSON libraries return bytes."""
    with pytest.raises(TypeError, match="encode can't be a str: write a function"):
        ManyJobs("h", [1], {}, "json")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="encode returned a bytes: return JSON as text"):
        list(ManyJobs("h", [1], {}, lambda _: b"1").statements())  # type: ignore[arg-type, return-value]


def test_enqueue_takes_the_handlers_name_and_not_the_function() -> None:
    """The function has its own enqueue method."""
    app = rota.App("a")

    @app.handler("send")
    async def send(job: rota.Job[Any]) -> None:
        del job

    for handler, cure in ((send, "write its name, 'send'"), (5, "write the name"), (None, "write the name")):
        with pytest.raises(TypeError, match=f"handler can't be a .*: {cure}"):
            ManyJobs(handler, [], {}, client.encode_payload)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_test_job", [make_job, make_sync_job])
@pytest.mark.parametrize("name", sorted(inline.JOB_FACTS - FREE | {"handler"}))
def test_each_wrong_argument_of_make_job_is_refused_by_name(make_test_job: Callable[..., Any], name: str) -> None:
    for value in KINDS[name]:
        with pytest.raises((TypeError, ValueError), match=rf"{name} (can't be|must have)"):
            make_test_job(None, **{name: value})
    with pytest.raises(TypeError, match="a job has no fact 'atempt': did you mean 'attempt'"):
        make_test_job(None, atempt=1)


async def test_perform_and_drain_refuse_wrong_arguments() -> None:
    """They take an app and a handler name, not the decorated function."""
    app = rota.App("a")

    @app.handler("send")
    async def send(job: rota.Job[Any]) -> None:
        del job

    calls: dict[str, Callable[[], Any]] = {
        "app can't be a str: write a rota.App": lambda: perform("a", "send"),  # type: ignore[arg-type]
        "handler can't be a function: write its name, 'send'": lambda: perform(app, send),  # type: ignore[arg-type]
        "timeout can't be a int": lambda: perform(app, "send", timeout=30),
        "no fact 'timout': did you mean 'timeout'": lambda: perform(app, "send", timout=30),
        "app can't be a NoneType": lambda: testing.drain(None, ""),  # type: ignore[arg-type]
        "at_once can't be a str: write True or False": lambda: testing.drain(app, "", at_once="no"),  # type: ignore[arg-type]
        "limit can't be a str: write a whole number": lambda: testing.drain(app, "", limit="5"),  # type: ignore[arg-type]
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            await call()


@pytest.mark.parametrize("exception_class", [rota.Retry, rota.Snooze])
def test_each_wrong_argument_of_retry_and_snooze_is_refused_by_name(exception_class: Any) -> None:
    """A bare number could mean seconds or minutes."""
    for value in (*DURATION, NAIVE):
        with pytest.raises(TypeError, match=rf"{exception_class.__name__}\(after=…\) can't be a .*: write a timedelta"):
            exception_class(after=value)
    for other in INSTANT[:3]:
        with pytest.raises(TypeError, match=rf"{exception_class.__name__}\(at=…\) can't be a .*: write a datetime"):
            exception_class(at=other)


def test_test_jobs_check_the_handlers_reports_as_a_daemon_does() -> None:
    job, sync = make_job(None), make_sync_job(None)
    for done in ("0.4", True, None):
        with pytest.raises(TypeError, match=r"done can't be a .*: write a number from 0 to 1"):
            sync.report_progress(done)  # type: ignore[arg-type]
    for beyond in (-0.1, 40, float("nan")):
        with pytest.raises(ValueError, match=r"done = .*: write a number from 0 to 1"):
            sync.report_progress(beyond)
    with pytest.raises(TypeError, match="note can't be a int"):
        sync.report_progress(0.5, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resource can't be a int"):
        asyncio.run(job.guard(None, 7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout can't be a int: write a timedelta"):
        sync.wait_for_stop(30)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reason = 'stop': choose one of 'cancel', 'drain'"):
        job.stop("stop")  # type: ignore[arg-type]


def test_make_job_and_make_sync_job_must_match_the_kind_of_handler() -> None:
    """A plain function would otherwise return a coroutine that is never awaited."""
    app = rota.App("a")

    @app.handler("plain")
    def plain(job: rota.SyncJob[int]) -> int:
        return job.payload

    @app.handler("coroutine")
    async def coroutine(job: rota.Job[int]) -> int:
        return job.payload

    with pytest.raises(TypeError, match="handler 'plain' is a plain def: call it with a job of make_sync_job"):
        plain(make_job(7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="handler 'coroutine' is an async def: call it with a job of make_job"):
        asyncio.run(coroutine(make_sync_job(7)))  # type: ignore[arg-type]
    assert plain(make_sync_job(7)) == asyncio.run(coroutine(make_job(7))) == 7
