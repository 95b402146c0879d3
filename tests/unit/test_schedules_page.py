"""Recompute the tables of docs/schedules.md cell by cell."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from pages import page, table
from rota.cron import Cron, zone
from rota.domain.schedule import Fire, Rule, plan
from rota.errors import InvalidCron
from schedule_rows import utc

PAGE = page("schedules")
BERLIN = zone("Europe/Berlin")


def parse_settings(text: str) -> dict[str, str]:
    """Turn `a = 'b'`, `c = 2` into {a: b, c: 2}."""
    return dict(re.findall(r"(\w+) = '?([^'`]+)'?", text))


def format_fires(fires: list[datetime]) -> str:
    return ", ".join(f"{at.astimezone(BERLIN):%H:%M} ({at:%H:%M}Z)" for at in fires) or "none"


DST = table(PAGE, "expression")


@pytest.mark.parametrize("row", DST, ids=lambda row: " ".join(row[:2]))
def test_the_dst_table_lists_the_actual_fires(row: list[str]) -> None:
    """For each entry, all fires from 01:00 to 03:59 in Berlin on the two days of 2026 with an offset change."""
    expression, given, march, october = row
    terms: dict[str, Any] = {name.removeprefix("dst_"): value for name, value in parse_settings(given).items()}
    cron = Cron(expression.strip("`"), timezone="Europe/Berlin", **terms)
    days = [(march, utc(2026, 3, 29), utc(2026, 3, 29, 2)), (october, utc(2026, 10, 24, 23), utc(2026, 10, 25, 3))]
    for cell, start, end in days:
        assert (start.astimezone(BERLIN).hour, end.astimezone(BERLIN).hour) == (1, 4)
        fires = [at for at in cron.next(start - timedelta(seconds=1), 50) if at < end]
        assert cell == format_fires(fires)


def test_the_dst_table_has_fixed_and_wildcard_entries_with_every_policy() -> None:
    """A table of easy cases would be correct too."""
    assert {each for row in DST for each in parse_settings(row[1]).items()} == {
        ("dst_gap", "skip"),
        ("dst_fold", "both"),
    }
    assert {row[0].strip("`").startswith("*/") for row in DST} == {True, False}
    assert len(DST) >= 8


def describe_fire(fire: Fire) -> str:
    count = fire.missed_count or 0
    first = fire.missed_from or fire.scheduled_for
    span = f"{first:%H:%M}" + (f" to {fire.scheduled_for:%H:%M}" if fire.scheduled_for > first else "")
    return f"one row: {span}, {count} instant{'' if count == 1 else 's'}"


@pytest.mark.parametrize("row", table(PAGE, "`misfire`"), ids=lambda row: row[0])
def test_the_misfire_table_lists_the_actual_fires(row: list[str]) -> None:
    """The schedule is hourly, and no daemon runs from 08:30 to 11:20."""
    which, runs, recorded = row
    (misfire,) = re.findall(r"^`'(\w+)'`", which)
    given: dict[str, Any] = {"misfire": misfire}
    for name, value in parse_settings(which).items():
        number = int(value.split()[0])
        given[name] = timedelta(minutes=number) if value.endswith("minutes") else number
    decided = plan(Rule(cron="0 * * * *", **given), now=utc(2026, 7, 1, 11, 20), next_fire_at=utc(2026, 7, 1, 9))
    tried = [fire for fire in decided.fires if fire.plan in {"enqueue", "enqueue_or_wait", "wait"}]
    skipped = [fire for fire in decided.fires if fire.plan == "skipped_misfire"]
    expected = ", ".join(f"{fire.scheduled_for:%H:%M}" for fire in tried) or "nothing"
    assert runs == expected + (", one after the other" if len(tried) > 1 else "")
    assert [fire.plan for fire in tried[1:]] == ["wait"] * len(tried[1:])
    assert recorded == "".join(map(describe_fire, skipped))


def test_expressions_on_the_page_are_accepted_or_refused_as_stated() -> None:
    for expression in ("0 6 * * 1-5", "0 0 L * *", "0 0 * * 5L", "0 0 * * 5#3", "@daily", "0 0 * JAN MON", "0 0 * * 7"):
        assert Cron(expression).next(utc(2026, 1, 1))
    for expression in ("0 0 30 2 *", "0 0 ? * 1", "0 0 1W * *", "0 0 * * FRI-MON", "*/61 * * * *", "0 0 0 1 1 * 2026"):
        with pytest.raises(InvalidCron):
            Cron(expression)
