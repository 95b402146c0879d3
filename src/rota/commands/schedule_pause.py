"""`rota schedule pause` and `resume`: for schedules given by name, or for those that filters select."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, takes_database
from rota.commands.options import (
    AsJson,
    DryRun,
    Handler,
    NamePattern,
    Note,
    Owner,
    argument,
    like_pattern,
    option,
    parse_duration_option,
    parse_instant,
)
from rota.commands.pausing import print_paused, print_resumed
from rota.commands.printing import plural, print_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rota.db.pool import Connection
    from rota.db.schedule_reports import ScheduleFilter

BATCH_SIZE = 10_000
"""Schedules in one transaction. It is large because each batch scans again the schedules of the earlier batches."""

Names = Annotated[list[str] | None, argument("NAME", "Names of the schedules. Give these, filters or --all.")]
All = Annotated[bool, typer.Option("--all", help="Select all schedules.")]


@takes_database
def pause(
    database: Database,
    names: Names = None,
    every: All = False,
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    until: Annotated[str | None, option("--until", "INSTANT", "Resume at this instant.")] = None,
    delay: Annotated[str | None, option("--for", "DURATION", "Resume after this time.")] = None,
    cancel_live: Annotated[bool, typer.Option("--cancel-live", help="Also cancel their live jobs.")] = False,
    note: Note = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Stop schedules from firing.

    Instants during the pause never run. They are recorded as skipped_paused.
    """
    which = _schedule_filter(names, every, handler, owner, name, dry_run=dry_run)
    if which is not None and cancel_live:
        raise typer.BadParameter(
            "works only with names. To cancel jobs by filter: rota job cancel", param_hint="--cancel-live"
        )
    if until is not None and delay is not None:
        raise typer.BadParameter("give either --until or --for, not both of them", param_hint="--until")
    resume_at, resume_after = parse_instant(until, "--until"), parse_duration_option(delay, "--for")
    if which is not None:
        _pause_selected(database, which, resume_at or resume_after, note, dry_run=dry_run, as_json=as_json)
        return
    unique_names = list(dict.fromkeys(names or []))

    async def work(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():  # all schedules or none
            return [
                await operations.pause_schedule(
                    db, name=name, resume_at=resume_at, delay=resume_after, cancel_live=cancel_live, reason=note
                )
                for name in unique_names
            ]

    changed = database.run(work, name="schedule pause")
    print_paused("schedule", unique_names, changed, as_json=as_json)


@takes_database
def resume(
    database: Database,
    names: Names = None,
    every: All = False,
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    paused_since: Annotated[
        str | None, option("--paused-since", "INSTANT", "Select only schedules that were paused after this.")
    ] = None,
    note: Note = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let paused schedules fire again, from their next instant on."""
    since = parse_instant(paused_since, "--paused-since")
    which = _schedule_filter(names, every or since is not None, handler, owner, name, dry_run=dry_run)
    if which is not None:
        _resume_selected(database, which, since, note, dry_run=dry_run, as_json=as_json)
        return
    unique_names = list(dict.fromkeys(names or []))

    async def work(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():  # all schedules or none
            return [await operations.resume_schedule(db, name=name, reason=note) for name in unique_names]

    changed = database.run(work, name="schedule resume")
    print_resumed("schedule", unique_names, changed, as_json=as_json)


def _schedule_filter(
    names: list[str] | None,
    every: bool,
    handler: str | None,
    owner: str | None,
    name: str | None,
    *,
    dry_run: bool,
) -> "ScheduleFilter | None":
    """Return the filter that the options describe, None if names are given. Raises BadParameter."""
    from rota.db.schedule_reports import ScheduleFilter

    has_filter = every or any(each is not None for each in (handler, owner, name))
    if bool(names) is has_filter:
        raise typer.BadParameter("give names, or --all, --handler, --owner or --name", param_hint="NAME")
    if names and dry_run:
        raise typer.BadParameter("works only with --all or filters, not with names", param_hint="--dry-run")
    return ScheduleFilter(handler=handler, owner=owner, name_like=like_pattern(name)) if has_filter else None


def _pause_selected(
    database: Database,
    which: "ScheduleFilter",
    until: datetime | timedelta | None,
    note: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pause the selected schedules, and print the command that resumes exactly these."""

    async def work(db: "Connection") -> tuple[int, int, datetime]:
        from rota.db import operations, queries, schedule_reports

        started_at = await queries.read_clock(db)
        active, paused = await schedule_reports.count_schedules(db, which=which)
        if dry_run:
            return active, paused, started_at
        resume_at = started_at + until if isinstance(until, timedelta) else until
        changed = await _change_in_batches(
            lambda: operations.pause_schedules(db, which=which, resume_at=resume_at, limit=BATCH_SIZE, reason=note),
            "paused",
        )
        still_active, _ = await schedule_reports.count_schedules(db, which=which)
        if still_active:
            typer.echo(
                f"{still_active:,} schedules are new or locked by other transactions. Run the command again", err=True
            )
        return changed, paused, started_at

    changed, paused_before, started_at = database.run(work, name="schedule pause")
    if as_json:
        dry = {"dry_run": True} if dry_run else {}
        print_json({**dry, "paused": changed, "paused_before": paused_before, "since": started_at})
    elif dry_run:
        typer.echo(
            f"dry run: {plural(changed, 'schedule')} would be paused, {paused_before:,} are paused already; nothing was changed"
        )
    else:
        typer.echo(
            f"{plural(changed, 'schedule')} paused; {paused_before:,} were paused before. Jobs already enqueued will run"
        )
        if changed and paused_before:
            typer.echo(f"to resume only these: rota schedule resume --paused-since {started_at.isoformat()}")


def _resume_selected(
    database: Database,
    which: "ScheduleFilter",
    paused_since: datetime | None,
    note: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    async def work(db: "Connection") -> int:
        from rota.db import operations, schedule_reports

        if dry_run:
            return (await schedule_reports.count_schedules(db, which=which, paused_since=paused_since))[1]
        return await _change_in_batches(
            lambda: operations.resume_schedules(
                db, which=which, paused_since=paused_since, limit=BATCH_SIZE, reason=note
            ),
            "resumed",
        )

    changed = database.run(work, name="schedule resume")
    if as_json:
        print_json({**({"dry_run": True} if dry_run else {}), "resumed": changed})
    elif dry_run:
        typer.echo(f"dry run: {plural(changed, 'schedule')} would be resumed; nothing was changed")
    else:
        typer.echo(f"{plural(changed, 'schedule')} resumed")


async def _change_in_batches(change: "Callable[[], Awaitable[int]]", verb: str) -> int:
    total = 0
    while changed := await change():
        total += changed
        if changed < BATCH_SIZE:
            break
        typer.echo(f"{total:,} {verb} …", err=True)
    return total
