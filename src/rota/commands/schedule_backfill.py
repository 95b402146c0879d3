"""`rota schedule backfill`: run past instants that did not run."""

from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.options import AsJson, ConfigFile, DryRun, Dsn, Embedded, Reason, duration, instant
from rota.commands.schedule_columns import Name, text_option, time_option
from rota.commands.schedule_sheet import the_schedule
from rota.commands.session import ask, using
from rota.commands.show import moment, plural, print_json

if TYPE_CHECKING:
    from rota.db.pool import Connection

MOST = 100_000
"""Most instants of one backfill."""


def backfill(
    name: Name,
    start: Annotated[str, text_option("--from", "The first instant, with its zone.", "INSTANT")],
    end: Annotated[str, text_option("--to", "Before this instant, with its zone.", "INSTANT")],
    spread: Annotated[str | None, time_option("--spread", "Make the jobs due evenly over this time.")] = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue jobs for past instants that did not run, each under its own scheduled_for, and each only once.

    Instants that have a fires row are left out; those skipped together, as a stretch, have none. The jobs run beside each
    other, whatever the schedule's overlap says: --spread thins them out.
    """
    first, before = instant(start, "--from"), instant(end, "--to")
    over = duration(spread, "--spread")
    assert first is not None  # noqa: S101  both are given
    assert before is not None  # noqa: S101
    if first >= before:
        raise typer.BadParameter("must lie before --to", param_hint="--from")

    async def fill(db: "Connection") -> dict[str, Any]:
        from rota.db import operations, queries
        from rota.domain.preview import between
        from rota.errors import RotaError

        seen = await the_schedule(db, name)
        now = await queries.read_clock(db)
        instants = list(islice(between(seen.rule, first, min(before, now)), MOST + 1))
        more = len(instants) > MOST
        del instants[MOST:]
        if dry_run:
            return {
                "dry_run": True, "instants": len(instants), "more": more, "enqueued": 0, "left_out": 0, "undecided": 0,
                "first": instants[:1], "last": instants[-1:],
            }  # fmt: skip
        if more:
            raise RotaError(
                f"{name!r} has more than {MOST:,} instants between these: take a shorter time, several times. The first "
                f"{MOST:,} end at {instants[-1].isoformat()}"
            )
        done = {"instants": len(instants), "enqueued": 0, "left_out": 0, "undecided": 0}
        step = over / len(instants) if over and instants else timedelta(0)
        for begin in range(0, len(instants), operations.BATCH):
            batch = instants[begin : begin + operations.BATCH]
            due = [now + (begin + number) * step for number in range(len(batch))]
            counts = await operations.backfill_schedule(db, name=name, instants=batch, run_at=due, reason=reason)
            for key, count in zip(("enqueued", "left_out", "undecided"), counts, strict=True):
                done[key] += count
        return {**done, "overlap": seen.overlap}

    with using(config_file, dsn, embedded=embedded) as config:
        done = ask(config, fill, name="schedule backfill")
    if as_json:
        print_json(done)
        return
    if dry_run:
        span = f", {moment(done['first'][0])} to {moment(done['last'][0])}" if done["instants"] else ""
        number = plural(done["instants"], "instant")
        if done["more"]:
            typer.echo(f"dry run: more than {number}; the first {done['instants']:,}{span}")
            typer.echo("no more than that at once: take a shorter time, several times", err=True)
        else:
            typer.echo(f"dry run: {number}{span}, those that have a fires row included")
        return
    typer.echo(f"{plural(done['enqueued'], 'job')} enqueued, {done['left_out']:,} left out: they have a fires row")
    if done["undecided"]:
        typer.echo(f"{done['undecided']:,} not decided yet: the daemons' (misfire)", err=True)
    if done["enqueued"] > 1 and done["overlap"] != "allow" and not over:
        typer.echo("note: they run beside each other, as far as there are slots: --spread thins them out", err=True)
