"""`rota schedule backfill`: enqueue jobs for past instants that did not run."""

from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.database import Database, takes_database
from rota.commands.options import (
    AsJson,
    DryRun,
    Note,
    ScheduleName,
    Spread,
    option,
    parse_duration_option,
    parse_instant,
)
from rota.commands.printing import format_instant, plural, print_json
from rota.commands.schedule_details import read_schedule

if TYPE_CHECKING:
    from rota.db.pool import Connection

MAX_INSTANTS = 100_000
"""Maximum number of instants in one backfill."""


@takes_database
def backfill(
    database: Database,
    name: ScheduleName,
    start: Annotated[str, option("--from", "INSTANT", "Start of the period, included.")],
    end: Annotated[str, option("--to", "INSTANT", "End of the period, not included.")],
    spread: Spread = None,
    note: Note = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue jobs for past instants that did not run.

    Each job has its own scheduled_for. Instants with a row in rota.fires are left out, so a second backfill adds nothing. The
    overlap setting doesn't apply: use --spread to limit how many jobs run at the same time.
    """
    first, before = parse_instant(start, "--from"), parse_instant(end, "--to")
    spread_time = parse_duration_option(spread, "--spread")
    assert first is not None  # noqa: S101  both options are required
    assert before is not None  # noqa: S101
    if first >= before:
        raise typer.BadParameter("must be before --to", param_hint="--from")

    async def work(db: "Connection") -> dict[str, Any]:
        from rota.db import operations, queries
        from rota.domain.preview import instants_between
        from rota.errors import RotaError

        schedule = await read_schedule(db, name)
        now = await queries.read_clock(db)
        instants = list(islice(instants_between(schedule.rule, first, min(before, now)), MAX_INSTANTS + 1))
        has_more = len(instants) > MAX_INSTANTS
        del instants[MAX_INSTANTS:]
        if dry_run:
            return {
                "dry_run": True, "instants": len(instants), "more": has_more, "enqueued": 0, "left_out": 0, "undecided": 0,
                "first": instants[:1], "last": instants[-1:],
            }  # fmt: skip
        if has_more:
            raise RotaError(
                f"{name!r} has more than {MAX_INSTANTS:,} instants in this period. Backfill shorter periods; the first one could "
                f"end at {instants[-1].isoformat()}"
            )
        result = {"instants": len(instants), "enqueued": 0, "left_out": 0, "undecided": 0}
        step = spread_time / len(instants) if spread_time and instants else timedelta(0)
        for begin in range(0, len(instants), operations.BATCH):
            batch = instants[begin : begin + operations.BATCH]
            due = [now + (begin + number) * step for number in range(len(batch))]
            counts = await operations.backfill_schedule(db, name=name, instants=batch, run_at=due, reason=note)
            for key, count in zip(("enqueued", "left_out", "undecided"), counts, strict=True):
                result[key] += count
        return {**result, "overlap": schedule.overlap}

    result = database.run(work, name="schedule backfill")
    if as_json:
        print_json(result)
    elif dry_run:
        _print_dry_run(result)
    else:
        typer.echo(
            f"{plural(result['enqueued'], 'job')} enqueued, {result['left_out']:,} instants left out: they have a row in rota.fires"
        )
        if result["undecided"]:
            typer.echo(
                f"{result['undecided']:,} instants left to the daemons, which have not decided about them yet", err=True
            )
        if result["enqueued"] > 1 and result["overlap"] != "allow" and not spread_time:
            typer.echo("note: these jobs may run at the same time. To distribute them: --spread", err=True)


def _print_dry_run(result: dict[str, Any]) -> None:
    period = (
        f", {format_instant(result['first'][0])} to {format_instant(result['last'][0])}" if result["instants"] else ""
    )
    number = plural(result["instants"], "instant")
    if result["more"]:
        typer.echo(f"dry run: more than {number}; the first {result['instants']:,}{period}")
        typer.echo("a backfill is limited to this number. Backfill shorter periods", err=True)
    else:
        typer.echo(f"dry run: {number}{period}, including those with a row in rota.fires")
