"""Options and arguments that several commands share, and the functions that read their text."""

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer


def option(flag: str, metavar: str, help: str, *, show_default: str | bool = False) -> Any:  # noqa: A002
    """Return an option that takes a value."""
    return typer.Option(flag, metavar=metavar, help=help, show_default=show_default)


def count_option(help: str, *, flag: str = "--limit", most: int | None = None) -> Any:  # noqa: A002
    """Return an option that takes a number of at least 1."""
    return typer.Option(flag, metavar="COUNT", min=1, max=most, help=help)


def argument(metavar: str, help: str, parser: Callable[[str], Any] | None = None) -> Any:  # noqa: A002
    """Return an argument without a default to show."""
    return typer.Argument(metavar=metavar, help=help, parser=parser, show_default=False)


def parse_job_id(text: str) -> int:
    """Parse a job id. Raises BadParameter if the text is not one."""
    if not (text.isdecimal() and text.isascii() and len(text) < 20 and 1 <= int(text) <= LARGEST_JOB_ID):
        raise typer.BadParameter(f"{text[:40]!r} is not a job id. Write a whole number from 1 to {LARGEST_JOB_ID}")
    return int(text)


LARGEST_JOB_ID = 2**63 - 1

App = Annotated[str | None, option("--app", "MODULE:APP", "Import the handlers from this app. [env: ROTA_APP]")]
ConfigFile = Annotated[
    Path | None, option("--config", "FILE", "Read this file instead of ./rota.toml. [env: ROTA_CONFIG]")
]
Dsn = Annotated[str | None, option("--dsn", "URL", "Connect to this database. [env: DATABASE_URL]")]
Embedded = Annotated[bool, typer.Option("--embedded", help="Use the embedded PostgreSQL of `rota dev`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would change, and change nothing.")]

JobId = Annotated[int, argument("ID", "Id of the job.", parse_job_id)]
OneJobId = Annotated[int | None, argument("ID", "Id of the job. Give this or filters.", parse_job_id)]
JobIds = Annotated[list[int] | None, argument("ID", "Ids of the jobs. Give these or filters.", parse_job_id)]
ScheduleName = Annotated[str, argument("NAME", "Name of the schedule.")]

Handler = Annotated[str | None, option("--handler", "NAME", "Select only this handler.")]
Queue = Annotated[str | None, option("--queue", "NAME", "Select only this queue.")]
Owner = Annotated[str | None, option("--owner", "NAME", "Select only this owner.")]
NamePattern = Annotated[str | None, option("--name", "PATTERN", "Select only matching names. Use * and ?.")]

Note = Annotated[str | None, option("--note", "TEXT", "Store this reason in the audit log.")]
At = Annotated[str | None, option("--at", "INSTANT", "When to run, as in 2026-03-01T09:00:00Z.")]
Delay = Annotated[str | None, option("--in", "DURATION", "How long from now to run, as in 30s or 1h30m.")]
After = Annotated[str | None, option("--after", "INSTANT", "List only later instants.", show_default="now")]
Spread = Annotated[str | None, option("--spread", "DURATION", "Distribute the start times evenly over this time.")]
ShowPayload = Annotated[bool, typer.Option("--payload", help="Also show the payload.")]
ShowErrors = Annotated[bool, typer.Option("--errors", help="Also show the error texts.")]


def replace_parameter(
    command: Callable[..., None],
    name: str,
    replacements: Sequence[Parameter],
    combine: Callable[[dict[str, Any]], Any],
    *,
    at_end: bool = False,
) -> Callable[..., None]:
    """Replace the parameter `name` of a command by several options. The parameter then gets `combine(values by option name)`.

    Typer reads the options from the signature. This lets several commands share the definition of several options.
    """

    def run(**values: Any) -> None:
        combined = combine({each.name: values.pop(each.name) for each in replacements})
        command(**values, **{name: combined})

    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature(command).parameters.values()]
    index = [each.name for each in parameters].index(name)
    del parameters[index]
    index = len(parameters) if at_end else index
    parameters[index:index] = replacements
    update_wrapper(run, command).__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return run


def like_pattern(pattern: str | None) -> str | None:
    """Translate a pattern with * and ? into a pattern for SQL's LIKE."""
    if pattern is None:
        return None
    return re.sub(r"[\\%_]", r"\\\g<0>", pattern).replace("*", "%").replace("?", "_")


_MAX_DURATION = timedelta(days=60_000)
"""Added to any accepted instant, this stays within the range of datetime."""


def parse_duration_option(text: str | None, flag: str) -> timedelta | None:
    """Parse `30s`, `1h30m` or a number of seconds. Raises BadParameter with the option's name."""
    from rota.config import parse_duration

    if text is None:
        return None
    try:
        length = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=flag) from error
    if length > _MAX_DURATION:
        raise typer.BadParameter(f"{text!r}: choose at most {_MAX_DURATION.days}d", param_hint=flag)
    return length


def time_or_age(text: str | None, flag: str) -> datetime | timedelta | None:
    """Parse an instant with a time zone, or a duration before now. Raises BadParameter."""
    from rota.config import parse_duration

    if text is not None:
        try:
            parse_duration(text)
        except ValueError:
            return parse_instant(text, flag)
    return parse_duration_option(text, flag)


def parse_instant(text: str | None, flag: str) -> datetime | None:
    """Parse an ISO instant with a time zone. Raises BadParameter with the option's name."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not an instant. Write 2026-03-01T09:00:00+01:00, or …Z for UTC", param_hint=flag
        ) from error
    if not 1900 <= moment.year < 9000:
        raise typer.BadParameter(f"{text!r}: choose a year from 1900 to 8999", param_hint=flag)
    if moment.tzinfo is None:
        raise typer.BadParameter(
            f"{text!r} has no time zone. Add Z for UTC, or an offset such as +01:00", param_hint=flag
        )
    return moment
