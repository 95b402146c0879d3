"""Validate the values that Python code passes to rota, argument by argument, so that an error names the argument and its cure.

`check` is for declarations (App, @app.handler, @app.schedule): it also checks the bounds of a handler's settings, because daemons
register all handlers in one statement and the database would not name the faulty one. The bounds of schedules and jobs are
checked by the database, which refuses that row alone. `check_kinds` is for calls, and checks the Python type only.
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

_NAMES = {"name", "queue", "handler", "owner"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "delivery": get_args(Delivery),
    "runs_in": ("process",),
    "misfire": get_args(Misfire),
    "overlap": get_args(Overlap),
    "dst_gap": get_args(Gap),
    "dst_fold": get_args(Fold),
}
_NOT_ON_ONE_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_TEXT = (str, "write a text")
_COUNT = (int, "write a whole number")
_DURATION = (timedelta, "write a timedelta, such as timedelta(seconds=30)")
_INSTANT = (datetime, "write a datetime with a zone, such as datetime.now(UTC) + timedelta(hours=1)")
_OBJECT = (Mapping, "write a dict")
_FLAG = (bool, "write True or False")

_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(_NAMES | _CHOICES.keys(), _TEXT),
    **dict.fromkeys(
        ("cron", "timezone", "description", "release", "unique_key", "idempotency_key", "on_conflict", "schedule", "note",
         "resource"), _TEXT,
    ),
    **dict.fromkeys(
        ("max_attempts", "priority", "catch_up_limit", "job_id", "attempt", "fence_token", "schedule_id", "count", "limit"), _COUNT,
    ),
    **dict.fromkeys(
        ("every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within",
         "too_late_after", "jitter", "expect_success_within"), _DURATION,
    ),
    **dict.fromkeys(("start_at", "end_at", "run_at", "start_by", "scheduled_for"), _INSTANT),
    **dict.fromkeys(("paused", "at_once"), _FLAG),
    "meta": _OBJECT,
    "done": ((int, float), "write a number from 0 to 1"),
}  # fmt: skip
"""Argument name -> its type, and what to write. An argument has the same type wherever it occurs."""


def check(what: str, **given: Any) -> None:
    """Raise ConfigError for the first invalid value; `what` names the declaration. None is the default, and always valid."""
    for name, value in given.items():
        if value is not None and (cure := _cure(name, value)):
            raise ConfigError(f"{what}: {name} = {value!r:.80}: {cure}")


def check_name(what: str, name: object) -> None:
    """Raise ConfigError for an invalid name; here, None is invalid too."""
    if name is None:
        raise ConfigError(f"{what}: name = None: {_cure('name', name)}")
    check(what, name=name)


def check_kinds(**given: Any) -> None:
    """Raise TypeError for the first value of a wrong type, ValueError for a datetime without a zone. None is always valid.

    The message names the type and not the value, which may be a part of the payload.
    """
    for name, value in given.items():
        kind, cure = _KINDS[name]
        if value is None:
            continue
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise TypeError(f"{name} can't be a {type(value).__name__}: {cure}")
        if kind is datetime and value.utcoffset() is None:
            raise ValueError(f"{name} must have a zone, or its instant is ambiguous: datetime.now(UTC), not now()")


def check_handler(handler: object) -> None:
    """Raise TypeError where a handler's name was expected and something else was given."""
    if not isinstance(handler, str):
        own = getattr(handler, "name", None)
        cure = f"write its name, {own!r}" if isinstance(own, str) else "write the name that @app.handler gives it"
        raise TypeError(f"handler can't be a {type(handler).__name__}: {cure}")


def check_progress(done: object, note: object) -> None:
    """Raise TypeError or ValueError for progress that can't be reported."""
    check_kinds(done=done, note=note)
    if done is None:
        raise TypeError("done can't be a NoneType: write a number from 0 to 1")
    if not 0 <= done <= 1:  # type: ignore[operator]  # checked above
        raise ValueError(f"done = {done}: write a number from 0 to 1")


def _cure(name: str, value: Any) -> str | None:
    """Return what to write instead, or None where the value is valid."""
    kind, cure = _KINDS[name]
    wrong = not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
    match name:
        case _ if name in _NAMES:
            fine = not wrong and 1 <= len(value) <= 200 and not _NOT_ON_ONE_LINE.search(value)
            return None if fine else "write a name, a text of 1 to 200 characters on one line"
        case _ if name in _CHOICES:
            *others, last = (repr(choice) for choice in _CHOICES[name])
            fine = not wrong and value in _CHOICES[name]
            return None if fine else f"choose {', '.join(others)}{' or ' if others else ''}{last}"
        case _ if wrong:
            return cure
        case "max_attempts" if not 1 <= value <= 1000:
            return "choose 1 to 1000"
        case "timeout" | "backoff_base" | "backoff_cap" if not timedelta(0) < value <= LONGEST_DELAY:
            return "choose more than 0, and at most 366 days"
        case _:
            return None
