"""The options of `rota schedule add` and `set`, and how their values become columns of rota.schedules."""

import json
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, NamedTuple

import typer

from rota.commands.enqueue import checked_json
from rota.commands.options import (
    duration,
    instant,
    option,
    replace_parameter,
)

Payload = Annotated[
    str | None, option("--payload", "JSON", "Payload of the schedule's jobs. Use - to read it from standard input.")
]


def _seconds(text: str, flag: str) -> Any:
    from rota.domain.payload import seconds

    length = duration(text, flag)
    return length and seconds(length)


def _instant(text: str, flag: str) -> Any:
    at = instant(text, flag)
    return at and at.isoformat()


def _json(text: str, flag: str) -> Any:
    return json.loads(checked_json(text, flag))


def _unchanged(value: Any, _flag: str) -> Any:
    return value


class Column(NamedTuple):
    """A column of rota.schedules that has an option."""

    kind: type
    parse: Callable[[Any, str], Any]
    """Turns the option's value into JSON. The second argument is the option's name, for usage errors."""
    option: Any


def _text(name: str, help: str, metavar: str = "TEXT", parse: Callable[[Any, str], Any] = _unchanged) -> Column:  # noqa: A002
    return Column(str, parse, option(_flag(name), metavar, help))


def _time(name: str, help: str) -> Column:  # noqa: A002
    return _text(name, help, "DURATION", _seconds)


def _number(
    name: str,
    help: str,  # noqa: A002
    metavar: str,
    low: int,
    high: int | None = None,
    *,
    show_default: str | bool = False,
) -> Column:
    number = typer.Option(_flag(name), metavar=metavar, help=help, min=low, max=high, show_default=show_default)
    return Column(int, _unchanged, number)


def _flag(name: str) -> str:
    return f"--{name.removeprefix('dst_').replace('_', '-')}"


COLUMNS = {
    "cron": _text("cron", "Cron expression. Give this or --every.", "EXPR"),
    "every": _time("every", "Interval, as in 90s or 1h30m. A day is 24 hours."),
    "timezone": _text("timezone", "Time zone of the cron expression, as in Europe/Berlin. [default: UTC]", "ZONE"),
    "queue": _text("queue", "Queue of the jobs. [default: the handler's]", "NAME"),
    "priority": _number("priority", "From 0 (first) to 9 (last).", "NUMBER", 0, 9, show_default="5"),
    "max_attempts": _number("max_attempts", "Attempts per job.", "COUNT", 1),
    "backoff_base": _time("backoff_base", "Delay before the first retry."),
    "backoff_cap": _time("backoff_cap", "Longest delay between two attempts."),
    "retry_for": _time("retry_for", "Stop retrying this long after the scheduled instant."),
    "timeout": _time("timeout", "Interrupt an attempt after this time."),
    "lease": _time("lease", "How long a claim is valid without a heartbeat."),
    "delivery": _text("delivery", "at_least_once or at_most_once."),
    "start_within": _time("start_within", "A job that has not started this long after it was due expires."),
    "meta": _text("meta", "JSON object to store with the jobs.", "JSON", _json),
    "start_at": _text("start_at", "First possible instant. --every counts from it.", "INSTANT", _instant),
    "end_at": _text("end_at", "Fire only before this instant.", "INSTANT", _instant),
    "misfire": _text("misfire", "Which missed instants to run: latest, skip or all. [default: latest]"),
    "on_time_within": _time(
        "on_time_within", "An instant that is handled later than this counts as missed. [default: 60s]"
    ),
    "too_late_after": _time("too_late_after", "Never run an instant that is missed by more than this."),
    "catch_up_limit": _number(
        "catch_up_limit",
        "With --misfire all: run at most this many missed instants.",
        "COUNT",
        1,
        show_default="100",
    ),
    "overlap": _text("overlap", "While the previous job is live: skip, allow, queue_one or replace. [default: skip]"),
    "dst_gap": _text("dst_gap", "For times that the clock skips: after or skip. [default: after]"),
    "dst_fold": _text("dst_fold", "For times that the clock shows twice: first or both. [default: first]"),
    "jitter": _time("jitter", "Delay jobs by up to this. The delay of a schedule is always the same."),
    "expect_success_within": _time("expect_success_within", "Alert when no job has succeeded for this long."),
    "description": _text("description", "Purpose of the schedule."),
    "owner": _text("owner", "Team or person in charge.", "NAME"),
}

RESETTABLE = tuple(sorted({*COLUMNS, "payload"} - {"cron", "every"}))


def takes_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of COLUMNS in place of its parameter `columns`, which then gets JSON values by column."""
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[column.kind | None, column.option])
        for name, column in COLUMNS.items()
    ]
    return replace_parameter(command, "columns", parameters, _parse)


def _parse(values: dict[str, Any]) -> dict[str, Any]:
    from rota.domain.schedule import check_rule

    columns = {name: COLUMNS[name].parse(value, _flag(name)) for name, value in values.items() if value is not None}
    if columns.keys() & {"cron", "timezone"}:
        check_rule(columns)
    return columns
