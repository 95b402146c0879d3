"""Public failures of cron in other systems, and the syntax that is refused, as data: none of them may happen here."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from rota.cron import Cron, InvalidCron, tzdata_version

HERE = Path(__file__).parent
HANDED: dict[str, Any] = json.loads((HERE / "cron_handed.json").read_text(encoding="utf-8"))
SYNTAX: list[dict[str, str]] = json.loads((HERE / "cron_invalid.json").read_text(encoding="utf-8"))["handed"]
REFUSED = [case for case in SYNTAX if "why" in case]
ACCEPTED = [case for case in SYNTAX if "why" not in case]


@pytest.mark.parametrize("case", HANDED["cases"], ids=lambda case: str(case["id"]))
def test_a_case_fires_when_it_should(case: dict[str, Any]) -> None:
    """The answer depends on the instant asked from, not on the zone it is written in, and not on the fire before it."""
    cron = Cron(case["expr"], timezone=case["timezone"], gap=case["gap"], fold=case["fold"])
    after = datetime.fromisoformat(case["after"])
    expected = [datetime.fromisoformat(fire) for fire in case["expect"]]
    hint = f"expected with IANA {HANDED['tzdata']}, computed with {tzdata_version()}"

    assert cron.next(after, case["count"]) == expected, hint
    assert cron.next(after.astimezone(ZoneInfo(case["timezone"])), len(expected)) == expected, hint
    assert [fire for start in [after, *expected[:-1]] for fire in cron.next(start)] == expected, hint


@pytest.mark.parametrize("case", HANDED["cases"], ids=lambda case: str(case["id"]))
def test_a_case_is_the_same_backwards(case: dict[str, Any]) -> None:
    """`previous` is the mirror of `next`: what a preview and a catch-up see is one and the same row of fires."""
    cron = Cron(case["expr"], timezone=case["timezone"], gap=case["gap"], fold=case["fold"])
    expected = [datetime.fromisoformat(fire) for fire in case["expect"]]

    assert cron.previous(expected[-1], len(expected) - 1) == expected[-2::-1]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["expr"] or "(empty)")
def test_a_doubtful_expression_is_refused(case: dict[str, str]) -> None:
    """An expression that means something else than its author thinks is worse than an error."""
    with pytest.raises(InvalidCron):
        Cron(case["expr"])


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["expr"])
def test_a_clear_expression_is_accepted(case: dict[str, str]) -> None:
    """Strictness must not cost what people rightly write."""
    after = datetime(2026, 1, 1, tzinfo=UTC)

    (fire,) = Cron(case["expr"]).next(after)

    assert fire > after
