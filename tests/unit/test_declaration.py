"""What a start of the code makes of the schedules it declares: decided purely, so every case is a line."""

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
    """A declaration of app shop, by default one that fires at six."""
    given = {"every": None, "payload": None, "paused": False, "handler": "h", **columns}
    if given["payload"] is not None:
        given["payload"] = json.dumps(given["payload"])
    return declare(name, cron=cron, **given)


def applied(step: Step, *, by: str = "shop") -> StoredSchedule:
    """What stands in the database once the step has been written."""
    # As jsonb gives it back: keys in another order, numbers spelled otherwise.
    kept = json.dumps(json.loads(step.declared or "{}"), sort_keys=True)
    return StoredSchedule(name=step.name, declared_by=by, declared=kept)


def one(
    wanted: Declaration | None, there: StoredSchedule | None, *, release: str | None = None, force: bool = False
) -> Step:
    """What becomes of it."""
    (step,) = reconcile([wanted] if wanted else [], [there] if there else [], app="shop", release=release, force=force)
    return step


def test_what_is_missing_is_inserted() -> None:
    """With its payload beside the columns, and what is kept of the declaration."""
    step = one(declaration(payload={"n": 1.5}, jitter=timedelta(minutes=5), paused=True), None, release="2")
    assert step.what == "inserted"
    assert step.columns["paused"] is True
    assert step.columns["jitter"] == "300 seconds"
    assert json.loads(step.payload or "") == {"n": 1.5}
    assert json.loads(step.declared or "") == {
        "cron": "0 6 * * *", "handler": "h", "jitter": "300 seconds", "payload": {"n": 1.5}, "release": "2",
    }  # fmt: skip


@pytest.mark.parametrize("number", [1, 1.0, 1e2, 1e22, 1e308, 2**60 + 1, 0.1, -3])
def test_a_declaration_that_has_not_changed_writes_nothing(number: float) -> None:
    """A restart is no edit, however the database spells a number."""
    wanted = declaration(payload={"n": number}, meta={"n": number})
    there = applied(one(wanted, None))
    assert there.declared is not None
    as_numeric = there.declared.replace("1e+308", "1" + "0" * 308).replace("1e+22", "1" + "0" * 22)
    assert one(wanted, StoredSchedule(name="s", declared_by="shop", declared=as_numeric)).what == "unchanged"


def test_only_what_has_changed_in_the_declaration_is_written() -> None:
    """An operator's edit of another column is none of the code's business."""
    there = applied(one(declaration(jitter=timedelta(minutes=5), priority=3), None))
    step = one(declaration(cron="0 7 * * *", priority=3), there)
    assert step.what == "updated"
    assert step.columns == {"cron": "0 7 * * *", "jitter": None}
    assert step.payload is None
    assert step.expected == there.declared


def test_a_payload_that_is_no_longer_declared_gets_its_default() -> None:
    """As every other column does."""
    there = applied(one(declaration(payload=[1]), None))
    assert one(declaration(), there).payload == "{}"


def test_a_long_payload_is_known_by_its_hash() -> None:
    """The declaration is kept beside the payload, and must not be as large once more."""
    long, other = declaration(payload="x" * 9000), declaration(payload="y" * 9000)
    there = applied(one(long, None))
    assert len(there.declared or "") < 500
    assert one(long, there).what == "unchanged"
    assert one(other, there).payload == json.dumps("y" * 9000)


@pytest.mark.parametrize(
    ("release", "than", "older"),
    [
        ("1", "2", True), ("2", "1", False), ("1.9", "1.10", True), ("v1.4.2", "1.4.3", True), ("1.2", "1.2.0", False),
        ("2026-09-30", "2026-10-01", True), ("9f3c1ab", "1e44d0a", False), (None, "2", False), ("2", None, False),
        ("2", "2", False), ("build-7", "1.0", False),
    ],
)  # fmt: skip
def test_versions_are_compared_as_such(release: str | None, than: str | None, older: bool) -> None:
    """1.10 comes after 1.9; of a commit's hash nobody can tell."""
    assert is_older(release, than) is older


def test_of_two_commits_the_one_that_came_first_is_older() -> None:
    """While both run side by side, a restart of the older one must not undo the newer one's change."""
    six, seven = declaration(), declaration(cron="0 7 * * *")
    first = applied(one(six, None, release="9f3c1ab"))
    second = one(seven, first, release="1e44d0a")
    assert second.what == "updated"
    restarted = one(six, applied(second), release="9f3c1ab")
    assert restarted.what == "newer_release"
    assert not restarted.writes
    third = one(six, applied(second), release="77aa00b")
    assert third.what == "updated"


def test_a_release_that_changes_nothing_is_still_remembered() -> None:
    """Else, of two releases that declare the same, the older would pass for a new one after the third has come."""
    first = applied(one(declaration(), None, release="a1"))
    second = one(declaration(), first, release="b2")
    assert (second.what, second.columns) == ("noted", {})
    third = one(declaration(cron="0 7 * * *"), applied(second), release="c3")
    assert one(declaration(), applied(third), release="a1").what == "newer_release"
    assert one(declaration(), applied(third), release="b2").what == "newer_release"


def test_going_back_is_possible_when_asked_for() -> None:
    """A rollback is somebody's decision."""
    newer = applied(one(declaration(cron="0 7 * * *"), None, release="2"))
    back = one(declaration(), newer, release="1", force=True)
    assert back.what == "updated"
    assert json.loads(back.declared or "")["release"] == "1"


@pytest.mark.parametrize("whose", [None, "billing"])
def test_what_somebody_else_made_is_left_alone(whose: str | None) -> None:
    """Two services may come upon the same name; neither takes the other's over unasked."""
    there = StoredSchedule(name="s", declared_by=whose, declared=None)
    assert one(declaration(), there).what == "not_ours"
    assert one(declaration(), there, force=True).what == "updated"


def test_what_is_no_longer_declared_is_told_of_unless_a_newer_release_has_it() -> None:
    """The older of two releases doesn't know the newer one's schedules."""
    there = applied(one(declaration(), None, release="2"))
    assert one(None, there, release="3").what == "undeclared"
    assert one(None, there, release="1").what == "newer_release"
    assert (
        reconcile([], [StoredSchedule(name="s", declared_by="billing", declared="{}")], app="shop", release="3") == []
    )


def test_durations_are_written_exactly() -> None:
    """In seconds: PostgreSQL's days are of another kind."""
    assert interval_text(timedelta(days=1, microseconds=1)) == "86400.000001 seconds"
    assert interval_text(timedelta(minutes=5)) == "300 seconds"
    assert interval_text(timedelta(seconds=-1.5)) == "-1.500000 seconds"


def test_what_cannot_be_is_refused_where_it_is_declared() -> None:
    """An error of the line that made it, at import, and not of some daemon at night."""
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


def test_a_schedule_may_stand_above_and_below_its_handler() -> None:
    """And takes the handler's name, where it is given none."""
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


def test_names_are_taken_once_and_functions_are_handlers() -> None:
    """Found when the app is complete, before anything is written."""
    twice = App("shop")
    twice.schedule("0 6 * * *", handler="h")
    twice.schedule("0 7 * * *", handler="h")
    with pytest.raises(ConfigError, match="declared twice"):
        _ = twice.schedules
    nobody = App("shop")

    @nobody.schedule("0 6 * * *", name="s")
    async def forgotten(job: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"forgotten is no handler"):
        _ = nobody.schedules
