"""`rota dead redrive` and `discard`: for dead letters given by job id, or for those that filters select."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.database import Database, takes_database
from rota.commands.dead_letters import Before, DeathReason, ErrorKind, letter_filter, print_groups
from rota.commands.enqueue import read_json
from rota.commands.options import (
    AsJson,
    DryRun,
    Handler,
    JobIds,
    Note,
    Queue,
    Spread,
    count_option,
    option,
    parse_duration_option,
)
from rota.commands.printing import MAX_LISTED, plural, print_json, printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from rota.db.pool import Connection
    from rota.db.reports import DeadLetterFilter

All = Annotated[bool, typer.Option("--all", help="Select all dead letters.")]
Limit = Annotated[int | None, count_option("Change at most this many dead letters.")]


@takes_database
def redrive(
    database: Database,
    job_ids: JobIds = None,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    every: All = False,
    limit: Limit = None,
    payload: Annotated[str | None, option("--payload", "JSON", "Replace the payload. Needs exactly one ID.")] = None,
    spread: Spread = None,
    include_at_most_once: Annotated[
        bool, typer.Option("--include-at-most-once", help="Also run at-most-once jobs again.")
    ] = False,
    note: Note = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run dead letters again, with all their attempts.

    Give job ids, or filters. Filters skip at-most-once jobs, unless --include-at-most-once is given.
    """
    which = letter_filter(handler, queue, reason, error_kind, before)
    ids = _selected_ids(job_ids, which, every)
    spread_time = parse_duration_option(spread, "--spread")
    if payload is not None and len(ids) != 1:
        raise typer.BadParameter("needs exactly one ID", param_hint="--payload")
    if spread_time is not None and ids:
        raise typer.BadParameter("works only with filters, not with IDs", param_hint="--spread")
    text = read_json(payload, "--payload")

    async def work(db: "Connection") -> dict[str, Any]:
        from rota.db import operations

        if ids:
            async with db.transaction():  # all jobs or none
                for job_id in ids:
                    await operations.redrive_dead_letter(db, job_id=job_id, payload=text, note=note)
            return {"redriven": len(ids), "left_out": 0}
        left_out = 0

        async def redrive_batch(selected: "DeadLetterFilter", size: int) -> int:
            nonlocal left_out
            redriven, left_out = await operations.redrive_dead_letters(
                db,
                which=selected,
                limit=size,
                spread=spread_time,
                include_at_most_once=include_at_most_once,
                note=note,
            )
            return redriven

        redriven = await _change_in_batches(db, which, limit, redrive_batch, "redriven")
        return {"redriven": redriven, "left_out": left_out}

    if dry_run:
        _print_dry_run(
            database, "redrive", ids, which, limit, as_json=as_json, skip_at_most_once=not include_at_most_once
        )
        return
    result = database.run(work, name="dead redrive")
    if as_json:
        print_json(result)
        return
    typer.echo(f"{plural(result['redriven'], 'dead letter')} redriven")
    if result["left_out"]:
        typer.echo(f"{result['left_out']:,} left out: live jobs have their unique_key or schedule", err=True)


@takes_database
def discard(
    database: Database,
    note: Annotated[str, option("--note", "TEXT", "Store this reason in the ledger.")],
    job_ids: JobIds = None,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    every: All = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters, which can't be redriven afterwards.

    The ledger records them as discarded, with your note.
    """
    which = letter_filter(handler, queue, reason, error_kind, before)
    ids = _selected_ids(job_ids, which, every)
    if not note.strip():
        raise typer.BadParameter("must not be empty. Give a short reason", param_hint="--note")

    async def work(db: "Connection") -> int:
        from rota.db import operations

        if not ids:
            return await _change_in_batches(
                db,
                which,
                limit,
                lambda selected, size: operations.discard_dead_letters(db, which=selected, limit=size, note=note),
                "discarded",
            )
        async with db.transaction():  # all jobs or none
            for job_id in ids:
                await operations.discard_dead_letter(db, job_id=job_id, note=note)
        return len(ids)

    if dry_run:
        _print_dry_run(database, "discard", ids, which, limit, as_json=as_json)
        return
    discarded = database.run(work, name="dead discard")
    print_json({"discarded": discarded}) if as_json else typer.echo(f"{plural(discarded, 'dead letter')} discarded")


def _selected_ids(job_ids: list[int] | None, which: "DeadLetterFilter", every: bool) -> list[int]:
    has_filter = any(value is not None for value in which.values) or every
    if bool(job_ids) is has_filter:
        raise typer.BadParameter("give job ids, or filters, or --all", param_hint="ID")
    return list(dict.fromkeys(job_ids or []))


async def _change_in_batches(
    db: "Connection",
    which: "DeadLetterFilter",
    limit: int | None,
    change: "Callable[[DeadLetterFilter, int], Awaitable[int]]",
    verb: str,
) -> int:
    """Call `change` with a filter and a batch size until all dead letters are changed, and return their number."""
    from rota.db import operations, queries

    # Exclude jobs that die during this command: a redriven job that fails at once must not be redriven again.
    now: datetime = await queries.read_clock(db)
    selected = dataclasses.replace(which, before=min(which.before or now, now))
    total = 0
    while (size := min(operations.BATCH, limit - total if limit else operations.BATCH)) > 0:
        changed = await change(selected, size)
        total += changed
        if changed < size:
            break
        typer.echo(f"{total:,} {verb} …", err=True)
    return total


def _print_dry_run(
    database: Database,
    command: str,
    ids: list[int],
    which: "DeadLetterFilter",
    limit: int | None,
    *,
    as_json: bool,
    skip_at_most_once: bool = False,
) -> None:
    """Print which dead letters the command would change."""
    from rota.db.reports import summarise_dead_letters

    verb = {"redrive": "redriven", "discard": "discarded"}[command]
    if ids:
        _print_dry_run_of_ids(database, command, ids, verb, as_json=as_json)
        return
    groups = database.run(lambda db: summarise_dead_letters(db, which=which), name=f"dead {command}")
    skipped = sum(group.at_most_once for group in groups) if skip_at_most_once else 0
    count = sum(group.letters for group in groups) - skipped
    selected = min(count, limit or count)
    if as_json:
        print_json({"dry_run": True, "letters": selected, "at_most_once_left": skipped, "groups": groups[:MAX_LISTED]})
        return
    if groups:
        print_groups(groups)
    of_total = f", the oldest of {count:,}" if selected < count else ""
    skips = f"; {skipped:,} at-most-once jobs would be skipped" if skipped else ""
    typer.echo(f"dry run: {plural(selected, 'dead letter')} would be {verb}{of_total}{skips}; nothing was changed")


def _print_dry_run_of_ids(database: Database, command: str, ids: list[int], verb: str, *, as_json: bool) -> None:
    from rota.db.reports import JobDescription, describe_job

    async def work(db: "Connection") -> list[JobDescription | None]:
        return [await describe_job(db, job_id=job_id) for job_id in ids]

    jobs = database.run(work, name=f"dead {command}")
    if as_json:
        states = {job_id: job.state if job else "unknown" for job_id, job in zip(ids, jobs, strict=True)}
        print_json({"dry_run": True, "jobs": states})
        return
    for job_id, job in zip(ids, jobs, strict=True):
        if job is None or job.state != "dead":
            state = job.state if job else "unknown"
            typer.echo(f"job {job_id} is {state}, not a dead letter: the command would change nothing")
        else:
            why = ": ".join(filter(None, (job.note, job.last_error_kind)))
            typer.echo(
                f"job {job_id} of {printable(job.handler)} in queue {printable(job.queue)} ({printable(why)}) would be {verb}"
            )
    typer.echo("dry run: nothing was changed")
