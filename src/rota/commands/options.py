"""The options that many commands share."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:APP", help="The app whose handlers run. [env: ROTA_APP]", show_default=False),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Instead of ./rota.toml. [env: ROTA_CONFIG]", show_default=False),
]
Dsn = Annotated[
    str | None, typer.Option("--dsn", metavar="URL", help="The database. [env: DATABASE_URL]", show_default=False)
]
Embedded = Annotated[bool, typer.Option("--embedded", help="Use the embedded PostgreSQL, as `rota dev` does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

LARGEST_JOB_ID = 2**63 - 1


def job_id(text: str) -> int:
    """Read a job's number; a usage error for what can't be one."""
    if not (text.isdecimal() and text.isascii() and len(text) < 20 and 1 <= int(text) <= LARGEST_JOB_ID):
        raise typer.BadParameter(f"{text[:40]!r} is no job id: those are whole numbers from 1 to {LARGEST_JOB_ID}")
    return int(text)


JobId = Annotated[int, typer.Argument(metavar="ID", parser=job_id, show_default=False, help="The job's number.")]
OneJobId = Annotated[
    int | None, typer.Argument(metavar="ID", parser=job_id, show_default=False, help="One job, or else:")
]
JobIds = Annotated[
    list[int] | None, typer.Argument(metavar="ID", parser=job_id, show_default=False, help="These, or else:")
]
Handler = Annotated[str | None, typer.Option("--handler", help="Only this handler's.", show_default=False)]
Reason = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", help="Why: it stands in the audit.", show_default=False)
]
Queue = Annotated[str | None, typer.Option("--queue", help="Only those of this queue.", show_default=False)]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be.")]


NamePattern = Annotated[
    str | None,
    typer.Option("--name", metavar="PATTERN", help="Only names like this, with * and ?.", show_default=False),
]
Owner = Annotated[str | None, typer.Option("--owner", help="Only this owner's.", show_default=False)]


def like(pattern: str | None) -> str | None:
    """Translate a pattern with * and ? into one of SQL's LIKE."""
    if pattern is None:
        return None
    return re.sub(r"[\\%_]", r"\\\g<0>", pattern).replace("*", "%").replace("?", "_")


_LONGEST = timedelta(days=60_000)
"""What can be added to any instant of these years."""


def duration(text: str | None, option: str) -> timedelta | None:
    """Read `30s`, `1h30m` or seconds; a usage error that names the option for anything else."""
    from rota.config import parse_duration

    if text is None:
        return None
    try:
        length = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=option) from error
    if length > _LONGEST:
        raise typer.BadParameter(f"{text!r}: choose at most {_LONGEST.days}d", param_hint=option)
    return length


def time_or_age(text: str | None, option: str) -> datetime | timedelta | None:
    """Read an instant with its zone, or how long ago as a duration."""
    from rota.config import parse_duration

    if text is not None:
        try:
            parse_duration(text)
        except ValueError:
            return instant(text, option)
    return duration(text, option)


def instant(text: str | None, option: str) -> datetime | None:
    """Read an ISO instant, which must say its zone."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is no instant: write 2026-03-01T09:00:00+01:00, or …Z for UTC", param_hint=option
        ) from error
    if not 1900 <= moment.year < 9000:
        raise typer.BadParameter(f"{text!r}: choose a year from 1900 to 8999", param_hint=option)
    if moment.tzinfo is None:
        raise typer.BadParameter(
            f"{text!r} names no zone: add Z for UTC, or an offset such as +01:00", param_hint=option
        )
    return moment
