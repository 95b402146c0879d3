"""`rota cron`: explain cron expressions, without a database."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rota.commands.options import (
    After,
    AsJson,
    argument,
    count_option,
    option,
    parse_instant,
)
from rota.commands.printing import console, format_instant, print_json, table

if TYPE_CHECKING:
    from datetime import timedelta

    from rota.domain.preview import Instant
    from rota.domain.schedule import Rule

app = typer.Typer(name="cron", help="Explain a cron expression.", no_args_is_help=True)

Expression = Annotated[str, argument("EXPR", "Cron expression in quotes: five fields, or six with seconds first.")]
Timezone = Annotated[str, option("--timezone", "ZONE", "Time zone of the expression.", show_default=True)]
Count = Annotated[int, count_option("Number of instants.", flag="--count", most=10_000)]
Gap = Annotated[str, option("--gap", "TEXT", "For times that the clock skips: after or skip.", show_default=True)]
Fold = Annotated[
    str, option("--fold", "TEXT", "For times that the clock shows twice: first or both.", show_default=True)
]


@app.command("next")
def next_(
    expression: Expression,
    timezone: Timezone = "UTC",
    after: After = None,
    count: Count = 5,
    gap: Gap = "after",
    fold: Fold = "first",
    as_json: AsJson = False,
) -> None:
    """List the next instants, in UTC and in local time.

    Instants that a change to or from daylight saving time moves or repeats are marked.
    """
    from rota.domain.preview import preview

    rule = checked_rule(expression, timezone, gap, fold)
    instants = preview(rule, parse_instant(after, "--after") or datetime.now(UTC), count)
    if as_json:
        print_json(instants)
        return
    print_instants(instants, None)
    if sum(each.fires for each in instants) < count:
        typer.echo("the expression has no later instants", err=True)


@app.command()
def explain(expression: Expression, timezone: Timezone = "UTC", as_json: AsJson = False) -> None:
    """Describe in words when an expression fires."""
    from rota.cron import Cron

    text = Cron(expression, timezone=timezone).explain()
    print_json({"expression": expression, "timezone": timezone, "explanation": text}) if as_json else typer.echo(text)


def checked_rule(expression: str, timezone: str, gap: str, fold: str) -> "Rule":
    """Return the rule. Raises InvalidCron, or BadParameter for --gap and --fold."""
    from rota.cron import Cron, Fold, Gap
    from rota.domain.schedule import Rule

    for flag, value, known in (("--gap", gap, get_args(Gap)), ("--fold", fold, get_args(Fold))):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=flag)
    settings: Any = {"timezone": timezone, "gap": gap, "fold": fold}
    checked = Cron(expression, **settings)
    return Rule(cron=checked.expr, timezone=checked.timezone, dst_gap=checked.gap, dst_fold=checked.fold)


def print_instants(instants: "list[Instant]", jitter: "timedelta | None") -> None:
    """Print a table of instants in UTC and in local time. With a jitter, it also has the time at which each job is due."""
    rows = [
        (
            format_instant(each.scheduled_for) if each.fires else "-",
            f"{each.local:%Y-%m-%d %H:%M:%S %a %Z}",
            *([format_instant(each.scheduled_for + jitter) if each.fires else "-"] if jitter is not None else []),
            each.note,
        )
        for each in instants
    ]
    due_column = () if jitter is None else ("job due (jitter)",)
    console().print(table(None, "UTC", "local", *due_column, "~", rows=rows))
