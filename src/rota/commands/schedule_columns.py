"""The options that say what a schedule is, and the columns that they become."""

import json
from collections.abc import Callable
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple

import typer

from rota.commands.enqueue import checked_json
from rota.commands.options import duration, instant

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The schedule's name.")]


def text_option(option: str, help: str, metavar: str = "TEXT") -> Any:  # noqa: A002
    """Return an option that takes a text, and has no default to show."""
    return typer.Option(option, metavar=metavar, help=help, show_default=False)


def time_option(option: str, help: str) -> Any:  # noqa: A002
    """Return an option that takes a length of time."""
    return text_option(option, help, "DURATION")


Payload = Annotated[str | None, text_option("--payload", "What its jobs carry; - reads it from the input.", "JSON")]


def _seconds(text: str, option: str) -> Any:
    from rota.domain.payload import seconds

    length = duration(text, option)
    return length and seconds(length)


def _instant(text: str, option: str) -> Any:
    at = instant(text, option)
    return at and at.isoformat()


def _json(text: str, option: str) -> Any:
    return json.loads(checked_json(text, option))


def _as_given(value: Any, _option: str) -> Any:
    return value


class Column(NamedTuple):
    """A column of rota.schedules as an option: what that takes, and how what is written there becomes JSON."""

    kind: type
    read: Callable[[Any, str], Any]
    """Called with the option's name, for usage errors."""
    terms: dict[str, Any]


def _text(help: str, metavar: str = "TEXT", read: Callable[[Any, str], Any] = _as_given) -> Column:  # noqa: A002
    return Column(str, read, {"help": help, "metavar": metavar, "show_default": False})


def _time(help: str) -> Column:  # noqa: A002
    return _text(help, "DURATION", _seconds)


def _number(help: str, *, show_default: str | bool = False, **bounds: int) -> Column:  # noqa: A002
    return Column(int, _as_given, {"help": help, "show_default": show_default, **bounds})


COLUMNS = {
    "cron": _text("When: a cron expression, or else:", "EXPR"),
    "every": _time("How often: 90s, 1h30m. A day is 24 hours."),
    "timezone": _text("On whose clock, such as Europe/Berlin. [default: UTC]", "ZONE"),
    "queue": _text("Instead of the handler's."),
    "priority": _number("0 first.", show_default="5", min=0, max=9),
    "max_attempts": _number("Of each job.", min=1),
    "backoff_base": _time("Before the first retry."),
    "backoff_cap": _time("At most between two tries."),
    "retry_for": _time("Give up that long after the instant."),
    "timeout": _time("Interrupt an attempt after that long."),
    "lease": _time("How long a claim holds without a heartbeat."),
    "delivery": _text("at_least_once or at_most_once."),
    "start_within": _time("Not begun that long after it was due: expired."),
    "meta": _text("An object kept beside its jobs.", "JSON", _json),
    "start_at": _text("Not before, with its zone; --every counts from it.", "INSTANT", _instant),
    "end_at": _text("Not at this instant or later.", "INSTANT", _instant),
    "misfire": _text("What was missed: latest, skip or all. [default: latest]"),
    "on_time_within": _time("Later than this, an instant was missed. [default: 60s]"),
    "too_late_after": _time("What was missed by more never runs."),
    "catch_up_limit": _number("Of all.", show_default="100", min=1),
    "overlap": _text("While its last job lives: skip, allow, queue_one or replace. [default: skip]"),
    "dst_gap": _text("At times the clock jumps over: after or skip. [default: after]"),
    "dst_fold": _text("At times the clock shows twice: first or both. [default: first]"),
    "jitter": _time("Run later by up to this, always the same for one schedule."),
    "expect_success_within": _time("Tell when there is none for so long."),
    "description": _text("What it is for."),
    "owner": _text("Whose it is."),
}

DEFAULTED = tuple(sorted({*COLUMNS, "payload"} - {"cron", "every"}))


def takes_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of COLUMNS in place of its parameter `columns`, where what was given arrives as JSON."""

    def called(**given: Any) -> None:
        columns = {name: value for name in COLUMNS if (value := given.pop(name)) is not None}
        command(**given, columns=_read(columns))

    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if each.name == "columns":
            parameters += [
                each.replace(
                    name=name, default=None, annotation=Annotated[kind | None, typer.Option(_option(name), **terms)]
                )
                for name, (kind, _, terms) in COLUMNS.items()
            ]
        else:
            parameters.append(each)
    update_wrapper(called, command).__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return called


def _read(given: dict[str, Any]) -> dict[str, Any]:
    from rota.domain.schedule import check_rule

    columns = {name: COLUMNS[name].read(value, _option(name)) for name, value in given.items()}
    if columns.keys() & {"cron", "timezone"}:
        check_rule(columns)
    return columns


def _option(name: str) -> str:
    return f"--{name.removeprefix('dst_').replace('_', '-')}"
