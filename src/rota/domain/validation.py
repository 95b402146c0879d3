"""Validate the arguments of rota's Python functions one by one, so that an error names the argument and its correction.

`check_declaration` is for App, @app.handler and @app.schedule. It also checks the bounds of a handler's settings: daemons register
all handlers in one statement, so a database error would not name the invalid one. The database checks the bounds of schedules and
jobs, because it rejects only that row. `check_types` is for function calls and checks only the Python types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from rota.cron import Fold, Gap
from rota.domain.schedule import Misfire, Overlap
from rota.errors import ConfigError
from rota.handler_exceptions import LONGEST_DELAY

Delivery = Literal["at_least_once", "at_most_once"]

_NAME_ARGUMENTS = {"name", "queue", "handler", "owner"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "delivery": get_args(Delivery),
    "runs_in": ("process",),
    "misfire": get_args(Misfire),
    "overlap": get_args(Overlap),
    "dst_gap": get_args(Gap),
    "dst_fold": get_args(Fold),
}
_CONTROL_OR_LINE_BREAK = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_TEXT = (str, "write a text")
_COUNT = (int, "write a whole number")
_DURATION = (timedelta, "write a timedelta, such as timedelta(seconds=30)")
_INSTANT = (datetime, "write a datetime with a zone, such as datetime.now(UTC) + timedelta(hours=1)")
_OBJECT = (Mapping, "write a dict")
_FLAG = (bool, "write True or False")

_TYPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(_NAME_ARGUMENTS | _CHOICES.keys(), _TEXT),
    **dict.fromkeys(
        ("cron", "timezone", "description", "release", "unique_key", "idempotency_key", "on_conflict", "limit_key",
         "schedule", "note", "resource"), _TEXT,
    ),
    **dict.fromkeys(
        ("max_attempts", "priority", "catch_up_limit", "job_id", "attempt", "fence_token", "schedule_id", "count", "limit",
         "max_running", "max_starts"), _COUNT,
    ),
    **dict.fromkeys(
        ("every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within",
         "too_late_after", "jitter", "expect_success_within", "per"), _DURATION,
    ),
    **dict.fromkeys(("start_at", "end_at", "run_at", "start_by", "scheduled_for"), _INSTANT),
    **dict.fromkeys(("paused", "at_once"), _FLAG),
    "meta": _OBJECT,
    "done": ((int, float), "write a number from 0 to 1"),
}  # fmt: skip
"""Argument name -> (type, correction). An argument has the same type in every function."""


def check_declaration(declaration: str, **arguments: Any) -> None:
    """Raise ConfigError for the first invalid value. `declaration` is its name for the message. None is always valid."""
    for name, value in arguments.items():
        if value is not None and (correction := _correction(name, value)):
            raise ConfigError(f"{declaration}: {name} = {value!r:.80}: {correction}")


def check_name(declaration: str, name: object) -> None:
    """Raise ConfigError for an invalid name. None is invalid, too."""
    if name is None:
        raise ConfigError(f"{declaration}: name = None: {_correction('name', name)}")
    check_declaration(declaration, name=name)


def check_types(**arguments: Any) -> None:
    """Raise TypeError for the first value of a wrong type, ValueError for a datetime without a zone. None is always valid.

    The message contains the value's type, but not the value, which may be part of the payload.
    """
    for name, value in arguments.items():
        expected, correction = _TYPES[name]
        if value is None:
            continue
        if not _has_type(value, expected):
            raise TypeError(f"{name} can't be a {type(value).__name__}: {correction}")
        if expected is datetime and value.utcoffset() is None:
            raise ValueError(f"{name} must have a zone, or its instant is ambiguous: datetime.now(UTC), not now()")


def check_handler_name(handler: object) -> None:
    """Raise TypeError if `handler` is not a string, for example the handler function itself."""
    if not isinstance(handler, str):
        own = getattr(handler, "name", None)
        correction = f"write its name, {own!r}" if isinstance(own, str) else "write the name that @app.handler gives it"
        raise TypeError(f"handler can't be a {type(handler).__name__}: {correction}")


def check_progress(done: object, note: object) -> None:
    """Raise TypeError or ValueError for invalid arguments of a progress report."""
    check_types(done=done, note=note)
    if done is None:
        raise TypeError("done can't be a NoneType: write a number from 0 to 1")
    if not 0 <= done <= 1:  # type: ignore[operator]  # checked above
        raise ValueError(f"done = {done}: write a number from 0 to 1")


def _has_type(value: Any, expected: Any) -> bool:
    """Return whether the value has the type. A bool is a Python int, but does not pass as one here."""
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))


def _correction(name: str, value: Any) -> str | None:
    """Return what to write instead of an invalid value, or None if the value is valid."""
    expected, correction = _TYPES[name]
    has_type = _has_type(value, expected)
    match name:
        case _ if name in _NAME_ARGUMENTS:
            valid = has_type and 1 <= len(value) <= 200 and not _CONTROL_OR_LINE_BREAK.search(value)
            return None if valid else "write a name, a text of 1 to 200 characters on one line"
        case _ if name in _CHOICES:
            *others, last = (repr(choice) for choice in _CHOICES[name])
            valid = has_type and value in _CHOICES[name]
            return None if valid else f"choose {', '.join(others)}{' or ' if others else ''}{last}"
        case _ if not has_type:
            return correction
        case "max_attempts" if not 1 <= value <= 1000:
            return "choose 1 to 1000"
        case "timeout" | "backoff_base" | "backoff_cap" if not timedelta(0) < value <= LONGEST_DELAY:
            return "choose more than 0, and at most 366 days"
        case "limit_key" if not 1 <= len(value) <= 200 or _CONTROL_OR_LINE_BREAK.search(value):
            return "write a text of 1 to 200 characters on one line"
        case "limit_key" if value.startswith(("handler:", "queue:")):
            return "write a key that does not begin with handler: or queue:"
        case "max_running" if value < 0:
            return "choose at least 0, which starts no jobs"
        case "max_starts" if not 1 <= value <= 100_000:
            return "choose 1 to 100000"
        case "per" if not timedelta(seconds=1) <= value <= timedelta(days=31):
            return "choose 1 second to 31 days"
        case _:
            return None
