"""What an app registers, and how it is found."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import rota
from rota.app import find_app
from rota.errors import AppNotFound, ConfigError


def test_a_handler_is_registered_with_what_was_declared_and_stays_callable() -> None:
    """The decorator gives the function back as it was."""
    app = rota.App("shop")

    async def send(job: rota.Job[Any]) -> str:
        return str(job)

    assert app.handler("send", queue="mail", timeout=timedelta(seconds=3), permanent=(KeyError,))(send) is send
    handler = app.handlers["send"]
    assert (handler.queue, handler.timeout, handler.permanent) == ("mail", timedelta(seconds=3), (KeyError,))
    assert (handler.max_attempts, handler.backoff_base, handler.delivery) == (None, None, None)


def test_a_name_is_declared_once() -> None:
    """Within one app, and between apps that are joined."""
    app, other = rota.App("a"), rota.App("b")
    for each in (app, other):
        each.handler("h")(lambda _: None)
    with pytest.raises(ConfigError, match="twice"):
        app.handler("h")(lambda _: None)
    with pytest.raises(ConfigError, match="both declare h"):
        app.include(other)


@pytest.mark.parametrize("function", [lambda: None, lambda _a, _b: None])
def test_a_handler_takes_exactly_the_job(function: Any) -> None:
    """Found at start, not at the first job."""
    with pytest.raises(ConfigError, match="exactly one argument"):
        rota.App("a").handler("h")(function)


def test_wishes_are_checked_where_they_are_made() -> None:
    """One of after and at, with a zone, within the schema's bounds: the traceback shows the handler's own line."""
    for wish in (rota.Retry, rota.Snooze):
        with pytest.raises(TypeError, match=r"either after= .* or at="):
            wish()
        with pytest.raises(TypeError, match="either"):
            wish(after=timedelta(1), at=datetime(2030, 1, 1, tzinfo=UTC))
        with pytest.raises(ValueError, match="naive"):
            wish(at=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused
        with pytest.raises(ValueError, match="between 0 and 366"):
            wish(after=timedelta(days=367))
        with pytest.raises(ValueError, match="between 0 and 366"):
            wish(after=timedelta(seconds=-1))
        with pytest.raises(ValueError, match="1970 and 2200"):
            wish(at=datetime(2200, 1, 1, tzinfo=UTC))
        after = wish(after=timedelta(seconds=1.5))
        assert wish.of(after.as_answer()).after == timedelta(seconds=1.5)
        at = wish(at=datetime(2030, 1, 1, tzinfo=UTC))
        assert wish.of(at.as_answer()).at == datetime(2030, 1, 1, tzinfo=UTC)


def test_an_app_is_found_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it isn't, the error says where it looked, what it found, and the likely spelling."""
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
