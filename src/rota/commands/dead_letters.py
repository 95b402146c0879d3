"""The filter options of `rota dead`, and the table of dead letters by group."""

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from rota.commands.options import option, parse_instant
from rota.commands.printing import MAX_LISTED, console, format_duration, plural, table
from rota.domain import settlement

if TYPE_CHECKING:
    from rota.db.reports import DeadLetterFilter, DeadLetterGroup

REASONS = get_args(settlement.Reason)

DeathReason = Annotated[str | None, option("--reason", "REASON", f"One of {', '.join(REASONS)}.")]
ErrorKind = Annotated[str | None, option("--error-kind", "NAME", "Select only this type of error.")]
Before = Annotated[str | None, option("--before", "INSTANT", "Select only jobs that died before this.")]


def letter_filter(
    handler: str | None, queue: str | None, reason: str | None, error_kind: str | None, before: str | None
) -> "DeadLetterFilter":
    """Return the filter that the options describe. Raises BadParameter."""
    from rota.db.reports import DeadLetterFilter

    if reason is not None and reason not in REASONS:
        raise typer.BadParameter(f"{reason!r} is not one of {', '.join(REASONS)}", param_hint="--reason")
    return DeadLetterFilter(
        handler=handler, queue=queue, reason=reason, error_kind=error_kind, before=parse_instant(before, "--before")
    )


def print_groups(groups: "list[DeadLetterGroup]") -> None:
    """Print one row for each group of dead letters, at most MAX_LISTED."""
    rows = [
        (
            f"{group.letters:,}",
            group.handler,
            group.queue,
            group.reason,
            group.error_kind,
            format_duration(group.now - group.oldest),
            format_duration(group.now - group.newest),
            group.sample,
        )
        for group in groups[:MAX_LISTED]
    ]
    console().print(
        table(None, "dead#", "handler~", "queue~", "reason", "error~", "oldest#", "newest#", "sample#", rows=rows)
    )
    if unlisted := groups[0].total - len(rows):
        console().print(
            f"… and {plural(unlisted, 'more group')} with fewer dead letters each. To select: --handler, --queue or --reason"
        )
