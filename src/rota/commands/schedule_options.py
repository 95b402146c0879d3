"""The options of `rota schedule add` and `set`, and the conversion of their values to columns of rota.schedules."""

import json
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, NamedTuple

import typer

from rota.commands.enqueue import checked_json
from rota.commands.options import option, parse_duration_option, parse_instant, replace_parameter

Payload = Annotated[
    str | None, option("--payload", "JSON", "Payload of the schedule's jobs. Use - to read it from standard input.")
]


def _parse_seconds(text: str, flag: str) -> Any:
    from rota.domain.payload import interval_text

    length = parse_duration_option(text, flag)
    return length and interval_text(length)


def _parse_instant(text: str, flag: str) -> Any:
    at = parse_instant(text, flag)
    return at and at.isoformat()


def _parse_json(text: str, flag: str) -> Any:
    return json.loads(checked_json(text, flag))


def _keep(value: Any, _flag: str) -> Any:
    return value


class Column(NamedTuple):
    """A column of rota.schedules that has an option."""

    kind: type
    parse: Callable[[Any, str], Any]
    """Turns the option's value into JSON. The second argument is the option's name, for usage errors."""
    option: Any


def _text_column(name: str, help: str, metavar: str = "TEXT", parse: Callable[[Any, str], Any] = _keep) -> Column:  # noqa: A002
    return Column(str, parse, option(_flag(name), metavar, help))


def _duration_column(name: str, help: str) -> Column:  # noqa: A002
    return _text_column(name, help, "DURATION", _parse_seconds)


def _number_column(
    name: str,
    help: str,  # noqa: A002
    metavar: str,
    low: int,
    high: int | None = None,
    *,
    show_default: str | bool = False,
) -> Column:
    number = typer.Option(_flag(name), metavar=metavar, help=help, min=low, max=high, show_default=show_default)
    return Column(int, _keep, number)


def _flag(name: str) -> str:
    return f"--{name.removeprefix('dst_').replace('_', '-')}"


COLUMNS = {
    "cron": _text_column("cron", "Cron expression. Give this or --every.", "EXPR"),
    "every": _duration_column("every", "Interval, as in 90s or 1h30m. A day is 24 hours."),
    "timezone": _text_column(
        "timezone", "Time zone of the cron expression, as in Europe/Berlin. [default: UTC]", "ZONE"
    ),
    "limit_key": _text_column("limit_key", "Key of the jobs in rota limit."),
    "queue": _text_column("queue", "Queue of the jobs. [default: the handler's]", "NAME"),
    "priority": _number_column("priority", "From 0 (first) to 9 (last).", "NUMBER", 0, 9, show_default="5"),
    "max_attempts": _number_column("max_attempts", "Attempts per job.", "COUNT", 1),
    "backoff_base": _duration_column("backoff_base", "Delay before the first retry."),
    "backoff_cap": _duration_column("backoff_cap", "Longest delay between two attempts."),
    "retry_for": _duration_column("retry_for", "Stop retrying this long after the scheduled instant."),
    "timeout": _duration_column("timeout", "Interrupt an attempt after this time."),
    "lease": _duration_column("lease", "How long a claim is valid without a heartbeat."),
    "delivery": _text_column("delivery", "at_least_once or at_most_once."),
    "start_within": _duration_column("start_within", "Expire a job that has not started this long after it was due."),
    "meta": _text_column("meta", "JSON object to store with the jobs.", "JSON", _parse_json),
    "start_at": _text_column("start_at", "First possible instant. --every counts from it.", "INSTANT", _parse_instant),
    "end_at": _text_column("end_at", "Fire only before this instant.", "INSTANT", _parse_instant),
    "misfire": _text_column("misfire", "Which missed instants to run: latest, skip or all. [default: latest]"),
    "on_time_within": _duration_column(
        "on_time_within", "An instant that is handled later than this counts as missed. [default: 60s]"
    ),
    "too_late_after": _duration_column("too_late_after", "Never run an instant that is missed by more than this."),
    "catch_up_limit": _number_column(
        "catch_up_limit",
        "With --misfire all: run at most this many missed instants.",
        "COUNT",
        1,
        show_default="100",
    ),
    "overlap": _text_column(
        "overlap", "While the previous job is live: skip, allow, queue_one or replace. [default: skip]"
    ),
    "dst_gap": _text_column("dst_gap", "For times that the clock skips: after or skip. [default: after]"),
    "dst_fold": _text_column("dst_fold", "For times that the clock shows twice: first or both. [default: first]"),
    "jitter": _duration_column("jitter", "Delay jobs by up to this. The delay of a schedule is always the same."),
    "expect_success_within": _duration_column(
        "expect_success_within", "Alert when no job has succeeded for this long."
    ),
    "description": _text_column("description", "Purpose of the schedule."),
    "owner": _text_column("owner", "Team or person in charge.", "NAME"),
}

RESETTABLE = tuple(sorted({*COLUMNS, "payload"} - {"cron", "every"}))


def takes_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `columns` of a command by the options of COLUMNS. The parameter then gets JSON values by column."""
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
