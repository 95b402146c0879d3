"""How an app registers handlers and schedules, and how rota finds the app."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

import rota
from rota.app import find_app
from rota.errors import AppNotFound, ConfigError, InvalidCron
from rota.testing import make_job, make_sync_job


def test_the_decorator_registers_the_handler_and_returns_the_function_unchanged() -> None:
    app = rota.App("shop")

    async def send(job: rota.Job[Any]) -> str:
        return str(job)

    assert app.handler("send", queue="mail", timeout=timedelta(seconds=3), permanent=(KeyError,))(send) is send
    handler = app.handlers["send"]
    assert (handler.queue, handler.timeout, handler.permanent) == ("mail", timedelta(seconds=3), (KeyError,))
    assert (handler.max_attempts, handler.backoff_base, handler.delivery) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 5}, r"handler 'h': timeout = 5: write a timedelta, such as timedelta\(seconds=30\)"),
        ({"timeout": "5s"}, "timeout = '5s': write a timedelta"),
        ({"timeout": timedelta(0)}, "timeout = .*: choose more than 0, and at most 366 days"),
        ({"timeout": timedelta(days=367)}, "choose more than 0, and at most 366 days"),
        ({"backoff_base": 5}, "backoff_base = 5: write a timedelta"),
        ({"backoff_cap": 5}, "backoff_cap = 5: write a timedelta"),
        ({"max_attempts": "8"}, "max_attempts = '8': write a whole number"),
        ({"max_attempts": 1.5}, "max_attempts = 1.5: write a whole number"),
        ({"max_attempts": True}, "max_attempts = True: write a whole number"),
        ({"max_attempts": 0}, "max_attempts = 0: choose 1 to 1000"),
        ({"queue": 5}, "queue = 5: write a name, a text of 1 to 200 characters on one line"),
        ({"queue": ""}, "queue = '': write a name"),
        ({"queue": "a\nb"}, "queue = .*: write a name"),
        ({"delivery": "once"}, "delivery = 'once': choose 'at_least_once' or 'at_most_once'"),
        ({"runs_in": "thread"}, "runs_in = 'thread': choose 'process'"),
        ({"limit_key": ""}, "limit_key = '': write a text of 1 to 200 characters on one line"),
        ({"limit_key": "queue:x"}, "limit_key = 'queue:x': write a key that does not begin with handler: or queue:"),
        ({"max_running": -1}, "max_running = -1: choose at least 0"),
        ({"max_starts": 0, "per": timedelta(1)}, "max_starts = 0: choose 1 to 100000"),
        ({"max_starts": 5, "per": timedelta(32)}, "per = .*: choose 1 second to 31 days"),
        ({"max_starts": 5}, "handler 'h' needs both max_starts and per, or neither"),
    ],
)
def test_an_invalid_handler_option_is_refused_by_name_at_import(options: dict[str, Any], message: str) -> None:
    """The database would reject all handlers together, without naming the option."""
    with pytest.raises(ConfigError, match=message):
        rota.App("a").handler("h", **options)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, 5, None])
def test_the_name_of_a_handler_or_an_app_must_be_one_line_of_text(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"handler: name = .*: write a name"):
        rota.App("a").handler(name)
    with pytest.raises(ConfigError, match=r"app: name = .*: write a name"):
        rota.App(name)


def test_the_handler_decorator_without_parentheses_is_refused() -> None:
    """Otherwise `@app.handler` would register nothing, without an error."""
    bare: Any = rota.App("a").handler

    async def send(job: rota.Job[Any]) -> None: ...

    with pytest.raises(ConfigError, match=re.escape('write @app.handler("send"): the handler needs a name')):
        bare(send)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 5}, "schedule 'h': every = 5: write a timedelta"),
        ({"jitter": 5}, "schedule 'h': jitter = 5: write a timedelta"),
        ({"too_late_after": "1h"}, "too_late_after = '1h': write a timedelta"),
        ({"start_at": "2026-01-01"}, r"start_at = '2026-01-01': write a datetime with a zone"),
        ({"priority": "5"}, "priority = '5': write a whole number"),
        ({"max_attempts": 0}, "max_attempts = 0: choose 1 to 1000"),
        ({"misfire": "x"}, "misfire = 'x': choose 'latest', 'skip' or 'all'"),
        ({"overlap": "x"}, "overlap = 'x': choose 'skip', 'allow', 'queue_one' or 'replace'"),
        ({"dst_gap": "x"}, "dst_gap = 'x': choose 'after' or 'skip'"),
        ({"timezone": 5}, "timezone = 5: write a text"),
        ({"cron": 5}, "cron = 5: write a text"),
    ],
)
def test_an_invalid_schedule_option_is_refused_by_name_at_import(options: dict[str, Any], message: str) -> None:
    """At the daemon's start, `5` would be read as seconds, or the schedule would be left out."""
    with pytest.raises(ConfigError, match=message):
        rota.App("a").schedule(**{**({} if "every" in options else {"cron": "0 0 * * *"}), **options}, handler="h")


def test_the_schedule_decorator_without_parentheses_is_refused() -> None:
    bare: Any = rota.App("a").schedule

    async def send(job: rota.Job[Any]) -> None: ...

    with pytest.raises(ConfigError, match=re.escape('write @app.schedule("0 6 * * *")')):
        bare(send)
    with pytest.raises(ConfigError, match="schedule: name = 5: write a name"):
        rota.App("a").schedule("0 0 * * *", name=cast("Any", 5))


def test_an_error_in_an_unnamed_schedule_quotes_its_expression() -> None:
    """The schedule's handler is not known before the app is complete."""
    with pytest.raises(InvalidCron, match=r"schedule '0 0 30 2 \*': there is no February 30"):
        rota.App("a").schedule("0 0 30 2 *")


def test_handlers_declare_limits_and_their_schedules_inherit_the_limit_key() -> None:
    """Also those of included apps. A schedule's own key wins, and a key function that fails names the schedule."""
    app, other = rota.App("a"), rota.App("b")
    app.handler("free")(lambda _: None)
    app.handler("mail", max_running=3, limit_key=lambda mail: f"to:{mail['to']}")(lambda _: None)
    other.handler("api", max_starts=10, per=timedelta(minutes=1), limit_key="api")(lambda _: None)
    app.include(other)
    assert {key: limit.columns for key, limit in app.limits.items()} == {
        "handler:mail": {"max_running": 3},
        "handler:api": {"max_starts": 10, "per": "60 seconds"},
    }
    app.schedule("0 0 * * *", name="own", handler="mail", payload={"to": 1}, limit_key="x")
    app.schedule("0 0 * * *", name="called", handler="mail", payload={"to": 1})
    app.schedule("0 0 * * *", handler="api")
    keys = {name: declaration.columns["limit_key"] for name, declaration in app.schedules.items()}
    assert keys == {"own": "x", "called": "to:1", "api": "api"}
    app.schedule("0 0 * * *", name="bad", handler="mail")
    with pytest.raises(ConfigError, match="schedule 'bad': limit_key of handler 'mail' fails for its payload"):
        _ = app.schedules


def test_the_error_for_a_payload_that_is_not_json_names_the_schedule() -> None:
    app = rota.App("a")
    app.schedule("0 0 * * *", name="nightly", handler="h", payload=object())
    with pytest.raises(ConfigError, match="schedule 'nightly': payload: object is not JSON"):
        _ = app.schedules


def test_invalid_arguments_of_retry_and_snooze_raise_in_the_handler() -> None:
    """Each takes either `after` or `at`, with a time zone and within the bounds of the schema."""
    for exception_class in (rota.Retry, rota.Snooze):
        with pytest.raises(TypeError, match=r"either after= .* or at="):
            exception_class()
        with pytest.raises(TypeError, match="either"):
            exception_class(after=timedelta(1), at=datetime(2030, 1, 1, tzinfo=UTC))
        with pytest.raises(ValueError, match="naive"):
            exception_class(at=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused
        with pytest.raises(ValueError, match="between 0 and 366"):
            exception_class(after=timedelta(days=367))
        with pytest.raises(ValueError, match="between 0 and 366"):
            exception_class(after=timedelta(seconds=-1))
        with pytest.raises(ValueError, match="1970 and 2200"):
            exception_class(at=datetime(2200, 1, 1, tzinfo=UTC))
        after = exception_class(after=timedelta(seconds=1.5))
        assert exception_class.of(after.as_answer()).after == timedelta(seconds=1.5)
        at = exception_class(at=datetime(2030, 1, 1, tzinfo=UTC))
        assert exception_class.of(at.as_answer()).at == datetime(2030, 1, 1, tzinfo=UTC)


def test_an_app_is_found_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is not found, the error says where rota looked and suggests the likely spelling."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "found_jobs.py").write_text("import rota\nshop = rota.App('shop')\n", encoding="ascii")
    (tmp_path / "broken_jobs.py").write_text("import no_such_module_at_all\n", encoding="ascii")
    assert find_app("found_jobs:shop").name == "shop"
    with pytest.raises(AppNotFound, match="did you mean found_jobs:shop"):
        find_app("found_jobs:shpo")
    with pytest.raises(
        AppNotFound, match=re.escape(f"no module 'no_jobs': looked in {Path.cwd()} and along PYTHONPATH")
    ):
        find_app("no_jobs:app")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AppNotFound, match=r"no module 'fuond_jobs'.*found_jobs"):
        find_app("fuond_jobs:shop")
    (tmp_path / "empty_jobs.py").write_text("", encoding="ascii")
    with pytest.raises(AppNotFound, match=r"empty_jobs holds no rota\.App at all"):
        find_app("empty_jobs:app")
    with pytest.raises(AppNotFound, match="no_such_module_at_all"):
        find_app("broken_jobs:app")
    for path in ("found_jobs.py", "./found_jobs.py", "./found_jobs", f"{tmp_path}/found_jobs.py"):
        with pytest.raises(AppNotFound, match=rf"no module '{re.escape(path)}'.*; did you mean found_jobs\? Give"):
            find_app(f"{path}:shop")
    with pytest.raises(AppNotFound, match=r"did you mean shop\.jobs\?"):
        find_app("shop/jobs.py:app")
    (tmp_path / "wrong_jobs.py").write_text(
        "import rota\napp = rota.App('a')\n\napp.schedule('0 0 30 2 *')\n", encoding="ascii"
    )
    with pytest.raises(AppNotFound, match=r"February 30.*\(.*wrong_jobs\.py, line 4\)"):
        find_app("wrong_jobs:app")


def test_reprs_name_the_object_and_show_no_payload() -> None:
    """Reprs appear in logs and tracebacks."""
    inner = rota.App("inner")
    app = rota.App("shop", release="v7")
    app.include(inner)

    @inner.handler("mail")
    def mail(job: rota.SyncJob[Any]) -> None:
        del job

    app.schedule("0 6 * * *", name="nightly", handler="mail", payload={"card": "s3cret"})
    declaration = app.schedules["nightly"]
    shown = [repr(app), repr(declaration), repr(app.handlers["mail"]), repr(mail)]
    shown += [repr(make_job({"card": "s3cret"}, job_id=7, attempt=2)), repr(make_sync_job("s3cret"))]
    assert shown[0] == "<App 'shop', release 'v7': 1 handlers, 1 schedules>"
    assert "name='nightly'" in shown[1]
    assert "'0 6 * * *'" in shown[1]
    assert "name='mail'" in shown[2]
    assert "mail" in shown[3]
    assert shown[4] == "<InlineJob 7 of 'test', attempt 2, token 1>"
    assert shown[5] == "<InlineSyncJob 1 of 'test', attempt 1, token 1>"
    assert not [text for text in shown if "s3cret" in text]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            rota.Refused("queue must not be empty", sqlstate="23514"),
            "Refused('queue must not be empty', sqlstate='23514')",
        ),
        (rota.StaleToken("job 7 is no longer ours"), "StaleToken('job 7 is no longer ours')"),
        (rota.Retry(after=timedelta(seconds=3)), "Retry(after=datetime.timedelta(seconds=3))"),
        (
            rota.Snooze(at=datetime(2030, 1, 1, tzinfo=UTC)),
            "Snooze(at=datetime.datetime(2030, 1, 1, 0, 0, tzinfo=datetime.timezone.utc))",
        ),
        (rota.Cancel("sold out"), "Cancel('sold out')"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_repr_of_an_error_shows_its_keyword_arguments(error: Exception, expected: str) -> None:
    """The default repr of an exception shows positional arguments only."""
    assert repr(error) == expected
