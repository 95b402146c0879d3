"""`rota schedule pause` and `resume` for many schedules: by handler, owner or name, or all."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import typer

from rota.commands.options import like
from rota.commands.session import ask
from rota.commands.show import plural, print_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rota.config import Config
    from rota.db.pool import Connection
    from rota.db.schedule_reports import ScheduleFilter

BATCH = 10_000
"""Schedules in one transaction: each batch walks over the schedules that earlier ones have changed."""


def schedule_filter(
    names: list[str] | None,
    every: bool,
    handler: str | None,
    owner: str | None,
    name: str | None,
    *,
    dry_run: bool,
) -> "ScheduleFilter | None":
    """Return what the options select, None for names. A usage error for both, for neither, and for a dry run of names."""
    from rota.db.schedule_reports import ScheduleFilter

    filtered = every or any(each is not None for each in (handler, owner, name))
    if bool(names) is filtered:
        raise typer.BadParameter("give names, or else --all, --handler, --owner or --name", param_hint="NAME")
    if names and dry_run:
        raise typer.BadParameter("goes with --all and filters, not with names", param_hint="--dry-run")
    return ScheduleFilter(handler=handler, owner=owner, name_like=like(name)) if filtered else None


def pause_many(
    config: "Config",
    which: "ScheduleFilter",
    until: datetime | timedelta | None,
    reason: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pause what the filter selects, and print how to undo exactly that."""

    async def work(db: "Connection") -> tuple[int, int, datetime]:
        from rota.db import operations, queries, schedule_reports

        began = await queries.read_clock(db)
        running, paused = await schedule_reports.count_schedules(db, which=which)
        if dry_run:
            return running, paused, began
        resume_at = began + until if isinstance(until, timedelta) else until
        changed = await _in_batches(
            lambda: operations.pause_schedules(db, which=which, resume_at=resume_at, limit=BATCH, reason=reason),
            "paused",
        )
        left, _ = await schedule_reports.count_schedules(db, which=which)
        if left:
            typer.echo(f"{left:,} are locked by other transactions, or new: run it again", err=True)
        return changed, paused, began

    changed, before, began = ask(config, work, name="schedule pause")
    if as_json:
        print_json(
            {**({"dry_run": True} if dry_run else {}), "paused": changed, "paused_before": before, "since": began}
        )
    elif dry_run:
        typer.echo(
            f"dry run: {plural(changed, 'schedule')} would be paused, {before:,} are already; nothing was changed"
        )
    else:
        typer.echo(
            f"{plural(changed, 'schedule')} paused; {before:,} were paused before. Jobs that are enqueued will run"
        )
        if changed and before:
            typer.echo(f"to resume these and no others: rota schedule resume --paused-since {began.isoformat()}")


def resume_many(
    config: "Config",
    which: "ScheduleFilter",
    paused_since: datetime | None,
    reason: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Resume what the filter selects."""

    async def work(db: "Connection") -> int:
        from rota.db import operations, schedule_reports

        if dry_run:
            return (await schedule_reports.count_schedules(db, which=which, paused_since=paused_since))[1]
        return await _in_batches(
            lambda: operations.resume_schedules(db, which=which, paused_since=paused_since, limit=BATCH, reason=reason),
            "resumed",
        )

    changed = ask(config, work, name="schedule resume")
    if as_json:
        print_json({**({"dry_run": True} if dry_run else {}), "resumed": changed})
    elif dry_run:
        typer.echo(f"dry run: {plural(changed, 'schedule')} would be resumed; nothing was changed")
    else:
        typer.echo(f"{plural(changed, 'schedule')} resumed")


async def _in_batches(act: "Callable[[], Awaitable[int]]", word: str) -> int:
    done = 0
    while changed := await act():
        done += changed
        if changed < BATCH:
            break
        typer.echo(f"{done:,} {word} …", err=True)
    return done
