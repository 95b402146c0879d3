"""Decisions about declared schedules at the start of an app, as pure functions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rota import App
from rota.domain.declaration import Declaration, Step, StoredSchedule, declare, is_older, reconcile
from rota.domain.payload import interval_text
from rota.errors import ConfigError, InvalidCron


def declaration(name: str = "s", *, cron: str | None = "0 6 * * *", **columns: Any) -> Declaration:
    """Return a declaration of app shop, by default one that fires at six."""
    given = {"every": None, "payload": None, "paused": False, "handler": "h", **columns}
    if given["payload"] is not None:
        given["payload"] = json.dumps(given["payload"])
    return declare(name, cron=cron, **given)


def apply_step(step: Step, *, by: str = "shop") -> StoredSchedule:
    """Return the stored row after the step has been written."""
    # jsonb returns keys in another order and numbers in another spelling.
    stored_json = json.dumps(json.loads(step.declared or "{}"), sort_keys=True)
    return StoredSchedule(name=step.name, declared_by=by, declared=stored_json)


def plan_one(
    declared: Declaration | None, stored: StoredSchedule | None, *, release: str | None = None, force: bool = False
) -> Step:
    """Plan the only declaration and return its step."""
    (step,) = reconcile(
        [declared] if declared else [], [stored] if stored else [], app="shop", release=release, force=force
    )
    return step


def test_a_missing_schedule_is_inserted() -> None:
    """The payload and the stored declaration are included."""
    step = plan_one(declaration(payload={"n": 1.5}, jitter=timedelta(minutes=5), paused=True), None, release="2")
    assert step.what == "inserted"
    assert step.columns["paused"] is True
    assert step.columns["jitter"] == "300 seconds"
    assert json.loads(step.payload or "") == {"n": 1.5}
    assert json.loads(step.declared or "") == {
        "cron": "0 6 * * *", "handler": "h", "jitter": "300 seconds", "payload": {"n": 1.5}, "release": "2",
    }  # fmt: skip


@pytest.mark.parametrize("number", [1, 1.0, 1e2, 1e22, 1e308, 2**60 + 1, 0.1, -3])
def test_an_unchanged_declaration_writes_nothing(number: float) -> None:
    """The spelling of numbers in the database does not count as a change."""
    declared = declaration(payload={"n": number}, meta={"n": number})
    stored = apply_step(plan_one(declared, None))
    assert stored.declared is not None
    as_numeric = stored.declared.replace("1e+308", "1" + "0" * 308).replace("1e+22", "1" + "0" * 22)
    assert plan_one(declared, StoredSchedule(name="s", declared_by="shop", declared=as_numeric)).what == "unchanged"


def test_only_the_changed_columns_of_a_declaration_are_written() -> None:
    """An operator's edit of another column is kept."""
    stored = apply_step(plan_one(declaration(jitter=timedelta(minutes=5), priority=3), None))
    step = plan_one(declaration(cron="0 7 * * *", priority=3), stored)
    assert step.what == "updated"
    assert step.columns == {"cron": "0 7 * * *", "jitter": None}
    assert step.payload is None
    assert step.expected == stored.declared


def test_a_payload_removed_from_the_declaration_returns_to_the_default() -> None:
    stored = apply_step(plan_one(declaration(payload=[1]), None))
    assert plan_one(declaration(), stored).payload == "{}"


def test_a_long_payload_is_compared_by_its_hash() -> None:
    """Otherwise the stored declaration would hold the payload a second time."""
    long, other = declaration(payload="x" * 9000), declaration(payload="y" * 9000)
    stored = apply_step(plan_one(long, None))
    assert len(stored.declared or "") < 500
    assert plan_one(long, stored).what == "unchanged"
    assert plan_one(other, stored).payload == json.dumps("y" * 9000)


@pytest.mark.parametrize(
    ("release", "than", "older"),
    [
        ("1", "2", True), ("2", "1", False), ("1.9", "1.10", True), ("v1.4.2", "1.4.3", True), ("1.2", "1.2.0", False),
        ("2026-09-30", "2026-10-01", True), ("9f3c1ab", "1e44d0a", False), (None, "2", False), ("2", None, False),
        ("2", "2", False), ("build-7", "1.0", False),
    ],
)  # fmt: skip
def test_releases_are_compared_as_version_numbers(release: str | None, than: str | None, older: bool) -> None:
    """1.10 is newer than 1.9. Commit hashes have no order."""
    assert is_older(release, than) is older


def test_the_commit_that_declared_first_counts_as_the_older_release() -> None:
    """While both run, a restart of the older release must not undo the newer one's change."""
    six, seven = declaration(), declaration(cron="0 7 * * *")
    first = apply_step(plan_one(six, None, release="9f3c1ab"))
    second = plan_one(seven, first, release="1e44d0a")
    assert second.what == "updated"
    restarted = plan_one(six, apply_step(second), release="9f3c1ab")
    assert restarted.what == "newer_release"
    assert not restarted.writes
    third = plan_one(six, apply_step(second), release="77aa00b")
    assert third.what == "updated"


def test_a_release_without_changes_is_recorded_too() -> None:
    """Otherwise the older of two equal releases would count as new after a third one."""
    first = apply_step(plan_one(declaration(), None, release="a1"))
    second = plan_one(declaration(), first, release="b2")
    assert (second.what, second.columns) == ("noted", {})
    third = plan_one(declaration(cron="0 7 * * *"), apply_step(second), release="c3")
    assert plan_one(declaration(), apply_step(third), release="a1").what == "newer_release"
    assert plan_one(declaration(), apply_step(third), release="b2").what == "newer_release"


def test_force_allows_a_rollback_to_an_older_release() -> None:
    newer = apply_step(plan_one(declaration(cron="0 7 * * *"), None, release="2"))
    back = plan_one(declaration(), newer, release="1", force=True)
    assert back.what == "updated"
    assert json.loads(back.declared or "")["release"] == "1"


@pytest.mark.parametrize("whose", [None, "billing"])
def test_a_schedule_of_another_owner_is_not_changed(whose: str | None) -> None:
    """Two services may use the same name. Neither takes over the other's schedule without force."""
    stored = StoredSchedule(name="s", declared_by=whose, declared=None)
    assert plan_one(declaration(), stored).what == "not_ours"
    assert plan_one(declaration(), stored, force=True).what == "updated"


def test_undeclared_schedules_are_reported_unless_a_newer_release_has_them() -> None:
    """The older of two releases does not know the newer one's schedules."""
    stored = apply_step(plan_one(declaration(), None, release="2"))
    assert plan_one(None, stored, release="3").what == "undeclared"
    assert plan_one(None, stored, release="1").what == "newer_release"
    assert (
        reconcile([], [StoredSchedule(name="s", declared_by="billing", declared="{}")], app="shop", release="3") == []
    )


def test_durations_are_written_as_exact_seconds() -> None:
    """A day in PostgreSQL is not always 24 hours."""
    assert interval_text(timedelta(days=1, microseconds=1)) == "86400.000001 seconds"
    assert interval_text(timedelta(minutes=5)) == "300 seconds"
    assert interval_text(timedelta(seconds=-1.5)) == "-1.500000 seconds"


def test_an_impossible_schedule_is_refused_at_import() -> None:
    app = App("shop")
    with pytest.raises(InvalidCron, match=r"schedule 'm'.*Europe/Berlin"):
        app.schedule("0 6 * * *", timezone="Europe/Berlln", name="m")
    with pytest.raises(InvalidCron, match="February 30"):
        app.schedule("0 0 30 2 *")
    with pytest.raises(ConfigError, match="either a cron expression or every"):
        app.schedule()
    with pytest.raises(ConfigError, match="at least 1 second"):
        app.schedule(every=timedelta(milliseconds=5))
    with pytest.raises(ConfigError, match="no timezone"):
        app.schedule("* * * * *", start_at=datetime(2026, 1, 1))  # noqa: DTZ001


def test_schedule_decorators_work_above_and_below_the_handler() -> None:
    """A schedule without a handler name takes the name of the decorated handler."""
    app = App("shop")

    @app.schedule("0 6 * * *")
    @app.handler("above")
    async def above(job: Any) -> None: ...

    @app.handler("below")
    @app.schedule("0 7 * * *", name="morning", start_at=datetime(2026, 1, 1, tzinfo=UTC))
    @app.schedule("0 8 * * *", name="later")
    async def below(job: Any) -> None: ...

    app.schedule(every=timedelta(hours=1), handler="elsewhere", name="hourly")
    assert {name: each.columns["handler"] for name, each in app.schedules.items()} == {
        "above": "above", "morning": "below", "later": "below", "hourly": "elsewhere",
    }  # fmt: skip
    assert app.schedules["morning"].columns["start_at"] == "2026-01-01T00:00:00+00:00"

    outer = App("all")
    outer.include(app)
    assert outer.schedules.keys() == app.schedules.keys()


def test_duplicate_schedules_and_functions_without_handler_are_refused() -> None:
    """The error is raised when the app is complete, before anything is written."""
    twice = App("shop")
    twice.schedule("0 6 * * *", handler="h")
    twice.schedule("0 7 * * *", handler="h")
    with pytest.raises(ConfigError, match="declared twice"):
        _ = twice.schedules
    app = App("shop")

    @app.schedule("0 6 * * *", name="s")
    async def forgotten(job: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"forgotten is no handler"):
        _ = app.schedules
