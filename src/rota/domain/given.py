"""What an app's code gives its handlers and schedules, checked on the line that gives it.

Types, for the database would take a bare number for seconds; and the bounds of what handlers have, for of all of them together it
would say that one is refused, and not which. Other bounds of a schedule's are the database's to judge: it refuses that one alone.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from rota.cron import Fold, Gap
from rota.domain.schedule import Misfire, Overlap
from rota.errors import ConfigError
from rota.signals import LONGEST_DELAY

if TYPE_CHECKING:
    from collections.abc import Mapping

Delivery = Literal["at_least_once", "at_most_once"]

_NAMES = {"name", "queue", "handler", "owner"}
_TEXTS = {"cron", "timezone", "description", "release"}
_COUNTS = {"max_attempts", "priority", "catch_up_limit"}
_DURATIONS = {
    "every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within", "too_late_after",
    "jitter", "expect_success_within",
}  # fmt: skip
_INSTANTS = {"start_at", "end_at"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "delivery": get_args(Delivery),
    "runs_in": ("process",),
    "misfire": get_args(Misfire),
    "overlap": get_args(Overlap),
    "dst_gap": get_args(Gap),
    "dst_fold": get_args(Fold),
}
_NOT_ON_ONE_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check(what: str, **given: Any) -> None:
    """Raise ConfigError for the first value that can't be, naming `what` it is given to. None is the default, and always can."""
    for name, value in given.items():
        if value is not None and (cure := _cure(name, value)):
            raise ConfigError(f"{what}: {name} = {value!r:.80}: {cure}")


def check_name(what: str, name: object) -> None:
    """Raise ConfigError for what is no name; here, None is none either."""
    if name is None:
        raise ConfigError(f"{what}: name = None: {_cure('name', name)}")
    check(what, name=name)


def _cure(name: str, value: Any) -> str | None:
    """Say what to write instead, or nothing where the value is fine."""
    match name:
        case _ if name in _NAMES:
            fine = isinstance(value, str) and 1 <= len(value) <= 200 and not _NOT_ON_ONE_LINE.search(value)
            return None if fine else "write a name, a text of 1 to 200 characters on one line"
        case _ if name in _TEXTS:
            return None if isinstance(value, str) else "write a text"
        case "max_attempts" if _is_whole(value) and not 1 <= value <= 1000:
            return "choose 1 to 1000"
        case _ if name in _COUNTS:
            return None if _is_whole(value) else "write a whole number"
        case _ if name in _DURATIONS and not isinstance(value, timedelta):
            return "write a timedelta, such as timedelta(seconds=30)"
        case "timeout" | "backoff_base" | "backoff_cap":
            return None if timedelta(0) < value <= LONGEST_DELAY else "choose more than 0, and at most 366 days"
        case _ if name in _INSTANTS:
            return None if isinstance(value, datetime) else "write a datetime with a zone"
        case _ if name in _CHOICES:
            *others, last = (repr(choice) for choice in _CHOICES[name])
            return None if value in _CHOICES[name] else f"choose {', '.join(others)}{' or ' if others else ''}{last}"
        case _:
            return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
