"""`rota dead`: what will not be tried again by itself, and waits for a person."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rota.commands.enqueue import given_json
from rota.commands.job_sheet import read_job, show_job
from rota.commands.options import (
    AsJson,
    ConfigFile,
    DryRun,
    Dsn,
    Embedded,
    Handler,
    JobId,
    JobIds,
    Queue,
    Reason,
    duration,
    instant,
)
from rota.commands.session import ask, using
from rota.commands.show import LISTED, age, console, distance, plural, print_json, printable, table
from rota.domain import settlement

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.reports import DeadLetterFilter, DeadLetterGroup, ListedDeadLetter

app = typer.Typer(name="dead", help="Look at dead letters, send them back, or end them.", no_args_is_help=True)

REASONS = get_args(settlement.Reason)

DeathReason = Annotated[str | None, typer.Option("--reason", help=f"One of {', '.join(REASONS)}.", show_default=False)]
ErrorKind = Annotated[str | None, typer.Option("--error-kind", help="Only after this error.", show_default=False)]
Before = Annotated[
    str | None, typer.Option("--before", metavar="INSTANT", help="Only what died before.", show_default=False)
]
Every = Annotated[bool, typer.Option("--all", help="Whatever there is.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="How many at most.", show_default=False)]


@app.command()
def summary(
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by handler, reason and kind of error."""
    which = letter_filter(handler, queue, reason, error_kind, before)
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db.reports import summarise_dead_letters

        groups = ask(config, lambda db: summarise_dead_letters(db, which=which, limit=LISTED), name="dead summary")
    if as_json:
        print_json(groups)
        return
    if not groups:
        typer.echo("no dead letters")
        return
    _print_groups(groups)
    typer.echo(
        "look at one: rota dead show SAMPLE --errors · send back: rota dead redrive --handler … · "
        "end: rota dead discard … --note …",
        err=True,
    )


@app.command("list")
def list_(
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")] = 20,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest job first."""
    which = letter_filter(handler, queue, reason, error_kind, before)
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db.reports import list_dead_letters

        letters = ask(config, lambda db: list_dead_letters(db, which=which, limit=limit), name="dead list")
    if as_json:
        print_json(letters)
        return
    _print_letters(letters)
    if len(letters) == limit:
        typer.echo(f"the oldest {limit}; there may be more: --limit, or rota dead summary", err=True)


@app.command()
def show(
    job_id: JobId,
    payload: Annotated[bool, typer.Option("--payload", help="Show what it carries, too.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Show the texts of its errors, too.")] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Say of one dead letter what was tried, and why it was given up."""
    from rota.errors import RotaError

    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: read_job(db, job_id, payload=payload, errors=errors), name="dead show")
    if seen.job.state != "dead":
        raise RotaError(f"job {job_id} is no dead letter: it is {seen.job.state} (rota job show {job_id})")
    show_job(seen, errors=errors, as_json=as_json)


@app.command()
def redrive(
    job_ids: JobIds = None,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    every: Every = False,
    limit: Limit = None,
    payload: Annotated[
        str | None,
        typer.Option("--payload", metavar="JSON", help="Another payload, for the one job named.", show_default=False),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option("--spread", metavar="DURATION", help="Make them due evenly over this time.", show_default=False),
    ] = None,
    include_at_most_once: Annotated[
        bool, typer.Option("--include-at-most-once", help="Those, too, that were to run once at most.")
    ] = False,
    note: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters back to run, attempts afresh: those named, or those that the filters let through.

    Ones that were to run once at most go only if named, or with --include-at-most-once.
    """
    which = letter_filter(handler, queue, reason, error_kind, before)
    ids = _one_way_of_saying(job_ids, which, every)
    over = duration(spread, "--spread")
    if payload is not None and len(ids) != 1:
        raise typer.BadParameter("goes with exactly one ID", param_hint="--payload")
    if over is not None and ids:
        raise typer.BadParameter("goes with filters, not with IDs", param_hint="--spread")
    text = given_json(payload, "--payload")

    async def work(db: "Connection") -> dict[str, Any]:
        from rota.db import operations, queries

        if ids:
            async with db.transaction():  # all that were named, or none
                for job_id in ids:
                    await operations.redrive_dead_letter(db, job_id=job_id, payload=text, note=note)
            return {"redriven": len(ids), "left_out": 0}
        # What dies again while we are at it is not taken a second time.
        those = _dying_before(which, await queries.read_clock(db))
        redriven = left_out = 0
        while (batch := min(operations.BATCH, limit - redriven if limit else operations.BATCH)) > 0:
            went, left_out = await operations.redrive_dead_letters(
                db, which=those, limit=batch, spread=over, include_at_most_once=include_at_most_once, note=note
            )
            redriven += went
            if went < batch:
                break
            typer.echo(f"{redriven:,} redriven …", err=True)
        return {"redriven": redriven, "left_out": left_out}

    with using(config_file, dsn, embedded=embedded) as config:
        if dry_run:
            spared = not include_at_most_once
            ask(
                config,
                lambda db: _say_what_would_be("redriven", db, ids, which, limit, as_json=as_json, spared=spared),
                name="dead redrive",
            )
            return
        done = ask(config, work, name="dead redrive")
    if as_json:
        print_json(done)
        return
    typer.echo(f"{plural(done['redriven'], 'dead letter')} redriven")
    if done["left_out"]:
        typer.echo(f"{done['left_out']:,} left out: live jobs have their unique_key or schedule", err=True)


@app.command()
def discard(
    note: Annotated[str, typer.Option("--note", help="Why: it stands in the ledger.", show_default=False)],
    job_ids: JobIds = None,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    every: Every = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """End dead letters for good: into the ledger as discarded, with your note."""
    which = letter_filter(handler, queue, reason, error_kind, before)
    ids = _one_way_of_saying(job_ids, which, every)
    if not note.strip():
        raise typer.BadParameter("say why, in a few words", param_hint="--note")

    async def work(db: "Connection") -> int:
        from rota.db import operations, queries

        if ids:
            async with db.transaction():  # all that were named, or none
                for job_id in ids:
                    await operations.discard_dead_letter(db, job_id=job_id, note=note)
            return len(ids)
        those = _dying_before(which, await queries.read_clock(db))
        discarded = 0
        while (batch := min(operations.BATCH, limit - discarded if limit else operations.BATCH)) > 0:
            ended = await operations.discard_dead_letters(db, which=those, limit=batch, note=note)
            discarded += ended
            if ended < batch:
                break
            typer.echo(f"{discarded:,} discarded …", err=True)
        return discarded

    with using(config_file, dsn, embedded=embedded) as config:
        if dry_run:
            ask(
                config,
                lambda db: _say_what_would_be("discarded", db, ids, which, limit, as_json=as_json),
                name="dead discard",
            )
            return
        discarded = ask(config, work, name="dead discard")
    print_json({"discarded": discarded}) if as_json else typer.echo(f"{plural(discarded, 'dead letter')} discarded")


def letter_filter(
    handler: str | None, queue: str | None, reason: str | None, error_kind: str | None, before: str | None
) -> "DeadLetterFilter":
    """Read the one set of filters that all of these commands have."""
    from rota.db.reports import DeadLetterFilter

    if reason is not None and reason not in REASONS:
        raise typer.BadParameter(f"{reason!r} is none of {', '.join(REASONS)}", param_hint="--reason")
    return DeadLetterFilter(
        handler=handler, queue=queue, reason=reason, error_kind=error_kind, before=instant(before, "--before")
    )


def _one_way_of_saying(job_ids: list[int] | None, which: "DeadLetterFilter", every: bool) -> list[int]:
    filtered = any(value is not None for value in which.values) or every
    if bool(job_ids) is filtered:
        raise typer.BadParameter("name IDs, or else filters, or --all", param_hint="ID")
    return list(dict.fromkeys(job_ids or []))


def _dying_before(which: "DeadLetterFilter", now: datetime) -> "DeadLetterFilter":
    import dataclasses

    return dataclasses.replace(which, before=min(which.before or now, now))


async def _say_what_would_be(
    became: str,
    db: "Connection",
    ids: list[int],
    which: "DeadLetterFilter",
    limit: int | None,
    *,
    as_json: bool,
    spared: bool = False,
) -> None:
    from rota.db import reports

    if ids:
        found = [await reports.describe_job(db, job_id=job_id) for job_id in ids]
        if as_json:
            states = {job_id: job.state if job else "unknown" for job_id, job in zip(ids, found, strict=True)}
            print_json({"dry_run": True, "jobs": states})
            return
        for job_id, job in zip(ids, found, strict=True):
            if job is None or job.state != "dead":
                typer.echo(f"job {job_id} is {job.state if job else 'unknown'}, no dead letter: all would be refused")
            else:
                why = ": ".join(filter(None, (job.note, job.last_error_kind)))
                typer.echo(
                    f"job {job_id} of {printable(job.handler)} in queue {printable(job.queue)} ({printable(why)}) would be {became}"
                )
        typer.echo("dry run: nothing was changed")
        return
    groups = await reports.summarise_dead_letters(db, which=which)
    once = sum(group.at_most_once for group in groups) if spared else 0
    count = sum(group.letters for group in groups) - once
    chosen = min(count, limit or count)
    if as_json:
        print_json({"dry_run": True, "letters": chosen, "at_most_once_left": once, "groups": groups[:LISTED]})
        return
    if groups:
        _print_groups(groups)
    bounded = f", the oldest of {count:,}" if chosen < count else ""
    left = f"; {once:,} that were to run once at most would stay" if once else ""
    typer.echo(f"dry run: {plural(chosen, 'dead letter')} would be {became}{bounded}{left}; nothing was changed")


def _print_groups(groups: "list[DeadLetterGroup]") -> None:
    rows = [
        (
            f"{group.letters:,}",
            group.handler,
            group.queue,
            group.reason,
            group.error_kind,
            age(group.now - group.oldest),
            age(group.now - group.newest),
            group.sample,
        )
        for group in groups[:LISTED]
    ]
    console().print(
        table(None, "dead#", "handler~", "queue~", "reason", "error~", "oldest#", "newest#", "sample#", rows=rows)
    )
    if more := groups[0].total - len(rows):
        console().print(
            f"… and {plural(more, 'more group')} with fewer dead letters each: use --handler, --queue or --reason"
        )


def _print_letters(letters: "list[ListedDeadLetter]") -> None:
    rows = [
        (
            letter.job_id,
            letter.handler,
            letter.queue,
            letter.reason,
            letter.error_kind,
            f"{letter.attempt}/{letter.max_attempts}" if letter.max_attempts else letter.attempt,
            distance(letter.finished_at, letter.now),
        )
        for letter in letters
    ]
    console().print(table(None, "job#", "handler~", "queue~", "reason", "error~", "attempt#", "died#", rows=rows))
