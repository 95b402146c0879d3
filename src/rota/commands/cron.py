"""`rota cron`: what an expression means, without a database."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rota.commands.options import AsJson, instant
from rota.commands.show import console, moment, print_json, table

if TYPE_CHECKING:
    from datetime import timedelta

    from rota.domain.preview import Instant
    from rota.domain.schedule import Rule

app = typer.Typer(name="cron", help="Ask what a cron expression means.", no_args_is_help=True)

Expression = Annotated[
    str, typer.Argument(metavar="EXPR", show_default=False, help="Five fields, or six with seconds first, in quotes.")
]
Timezone = Annotated[str, typer.Option("--timezone", metavar="ZONE", help="On whose clock it is read.")]
Count = Annotated[int, typer.Option("--count", min=1, max=10_000, help="How many.")]
Gap = Annotated[str, typer.Option("--gap", help="At times the clock jumps over: after (at the jump) or skip.")]
Fold = Annotated[str, typer.Option("--fold", help="At times the clock shows twice: first or both.")]
After = Annotated[
    str | None, typer.Option("--after", metavar="INSTANT", help="After when, with its zone.", show_default="now")
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
    """List the next instants, in UTC and on the zone's clock; what daylight saving does to them is marked."""
    from rota.domain.preview import preview

    rule = checked_rule(expression, timezone, gap, fold)
    found = preview(rule, instant(after, "--after") or datetime.now(UTC), count)
    if as_json:
        print_json(found)
        return
    print_instants(found, None)
    if sum(each.fires for each in found) < count:
        typer.echo("there are no more", err=True)


@app.command()
def explain(expression: Expression, timezone: Timezone = "UTC", as_json: AsJson = False) -> None:
    """Say in words when an expression fires."""
    from rota.cron import Cron

    said = Cron(expression, timezone=timezone).explain()
    print_json({"expression": expression, "timezone": timezone, "explanation": said}) if as_json else typer.echo(said)


def checked_rule(expression: str, timezone: str, gap: str, fold: str) -> "Rule":
    """Return the rule. Raises InvalidCron."""
    from rota.cron import Cron, Fold, Gap
    from rota.domain.schedule import Rule

    for option, value, known in (("--gap", gap, get_args(Gap)), ("--fold", fold, get_args(Fold))):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is neither of {', '.join(known)}", param_hint=option)
    terms: Any = {"timezone": timezone, "gap": gap, "fold": fold}
    checked = Cron(expression, **terms)
    return Rule(cron=checked.expr, timezone=checked.timezone, dst_gap=checked.gap, dst_fold=checked.fold)


def print_instants(found: "list[Instant]", jitter: "timedelta | None") -> None:
    """Lay them out: UTC, the zone's clock, and with a jitter when the job is due."""
    rows = [
        (
            moment(each.scheduled_for) if each.fires else "-",
            f"{each.local:%Y-%m-%d %H:%M:%S %a %Z}",
            *([moment(each.scheduled_for + jitter) if each.fires else "-"] if jitter is not None else []),
            each.note,
        )
        for each in found
    ]
    due = () if jitter is None else ("job due (jitter)",)
    console().print(table(None, "UTC", "local", *due, "~", rows=rows))
