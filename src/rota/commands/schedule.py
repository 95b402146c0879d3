"""`rota schedule`: make, edit, look at and stop what recurs."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.cron import print_instants
from rota.commands.enqueue import given_json
from rota.commands.options import (
    AsJson,
    ConfigFile,
    DryRun,
    Dsn,
    Embedded,
    Handler,
    NamePattern,
    Owner,
    Reason,
    duration,
    instant,
    like,
)
from rota.commands.pausing import say_paused, say_resumed
from rota.commands.schedule_backfill import backfill
from rota.commands.schedule_columns import (
    DEFAULTED,
    Name,
    Payload,
    takes_columns,
    text_option,
    time_option,
)
from rota.commands.schedule_sheet import crowded, read_schedule, show_schedule, the_schedule, upcoming
from rota.commands.schedule_sync import sync
from rota.commands.schedules_by_filter import pause_many, resume_many, schedule_filter
from rota.commands.session import ask, using
from rota.commands.show import age, console, distance, fields_of, moment, plural, print_json, printable, relative, table

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.schedule_reports import ListedSchedule, ScheduleDescription

app = typer.Typer(name="schedule", help="Make schedules, edit them, look at them, stop them.", no_args_is_help=True)

STATES = ("ok", "invalid", "paused", "overdue", "ended", "silent")

Names = Annotated[list[str], typer.Argument(metavar="NAME…", show_default=False, help="Which.")]
Many = Annotated[
    list[str] | None, typer.Argument(metavar="NAME…", show_default=False, help="These; or else --all or filters.")
]
Every = Annotated[bool, typer.Option("--all", help="All schedules.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many at most.")]


@app.command()
@takes_columns
def add(
    name: Name,
    handler: Annotated[str, typer.Argument(metavar="HANDLER", help="What its jobs run.", show_default=False)],
    columns: dict[str, Any],
    payload: Payload = None,
    paused: Annotated[bool, typer.Option("--paused", help="Let it wait for rota schedule resume.")] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make a schedule, and say when it fires next."""
    from rota.errors import RotaError

    if ("cron" in columns) is ("every" in columns):
        raise typer.BadParameter("say either --cron or --every", param_hint="--cron")
    text = given_json(payload, "--payload")

    async def insert(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations

        row = json.dumps({**columns, "name": name, "handler": handler, "paused": paused})
        if await operations.add_schedule(db, columns=row, payload=text) is None:
            raise RotaError(f"there is a schedule {name!r} already: rota schedule set changes it")
        made = await the_schedule(db, name)
        return made, await _warnings(db, made)

    with using(config_file, dsn, embedded=embedded) as config:
        made, warnings = ask(config, insert, name="schedule add")
    _say_when(made, warnings, as_json=as_json)


@app.command("set")
@takes_columns
def set_(
    name: Name,
    columns: dict[str, Any],
    handler: Annotated[str | None, text_option("--handler", "What its jobs run.")] = None,
    payload: Payload = None,
    default: Annotated[
        list[str] | None, typer.Option("--default", metavar="COLUMN", help="Give it its default.", show_default=False)
    ] = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Change what is named of a schedule. Nothing fires by that: what comes next lies strictly after the edit."""
    if {"cron", "every"} <= columns.keys():
        raise typer.BadParameter("say either --cron or --every", param_hint="--cron")
    if handler is not None:
        columns["handler"] = handler
    for column in default or []:
        if column not in DEFAULTED:
            raise typer.BadParameter(f"{column!r} is none of {', '.join(DEFAULTED)}", param_hint="--default")
        columns.setdefault(column, None)
    if "cron" in columns:
        columns["every"] = None
    elif "every" in columns:
        columns["cron"] = None
    text = "{}" if payload is None and "payload" in columns else given_json(payload, "--payload")
    if not columns and text is None:
        raise typer.BadParameter("say what is to change, such as --cron or --timezone", param_hint="NAME")

    async def edit(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations
        from rota.domain.schedule import check_rule

        known = await the_schedule(db, name)
        if columns.keys() & {"cron", "every", "timezone", "dst_gap", "dst_fold"}:
            check_rule({"cron": known.cron, "timezone": known.timezone} | columns)
        await operations.edit_schedule(db, name=name, columns=json.dumps(columns), payload=text)
        made = await the_schedule(db, name)
        return made, await _warnings(db, made)

    with using(config_file, dsn, embedded=embedded) as config:
        made, warnings = ask(config, edit, name="schedule set")
    _say_when(made, warnings, as_json=as_json)


@app.command("list")
def list_(
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help=f"One of {', '.join(STATES)} (no success in time).", show_default=False),
    ] = None,
    limit: Limit = 1000,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List schedules by name: when they fire, how they are, when they last succeeded."""
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"{state!r} is none of {', '.join(STATES)}", param_hint="--state")
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db.schedule_reports import ScheduleFilter, list_schedules

        which = ScheduleFilter(handler=handler, owner=owner, name_like=like(name))
        found = ask(config, lambda db: list_schedules(db, which=which, state=state, limit=limit), name="schedule list")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.name,
            f"{each.cron} {each.timezone}" if each.cron else f"every {age(each.every)}",
            each.handler,
            each.state,
            distance(each.next_fire_at, each.now),
            distance(each.last_success_at, each.now) or "never",
            _amiss(each),
        )
        for each in found
    ]
    # What fits a terminal of 80 columns; the instants are in --json and `rota schedule show`.
    columns = ("name~", "when~", "handler~", "state", "next#", "success#", "~")
    console().print(table(None, *columns, rows=rows))
    if len(found) == limit:
        typer.echo(f"the first {limit:,}; there may be more: --limit", err=True)


def _amiss(each: "ListedSchedule") -> str:
    failed = f"failed {plural(each.consecutive_failures, 'time')}" if each.consecutive_failures else ""
    return each.invalid_reason or ", ".join(filter(None, (failed, "no success in time" if each.silent else "")))


@app.command()
def show(
    name: Name,
    payload: Annotated[bool, typer.Option("--payload", help="Show what its jobs carry, too.")] = False,
    fires: Annotated[int, typer.Option("--fires", min=0, max=10_000, help="How many of its last fires.")] = 10,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Say everything about a schedule, and what became of its last instants."""
    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: read_schedule(db, name, fires=fires), name="schedule show")
    show_schedule(seen, payload=payload, as_json=as_json)


@app.command()
def preview(
    name: Name,
    after: Annotated[
        str | None, typer.Option("--after", metavar="INSTANT", help="After when, with its zone.", show_default="now")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="How many.")] = 5,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List a schedule's next instants, in UTC and on its own clock; gaps, folds and jitter are marked."""
    since = instant(after, "--after")
    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: the_schedule(db, name), name="schedule preview")
    from rota.domain import preview as ahead

    found = ahead.preview(seen.rule, since or seen.now, count)
    if as_json:
        offset = seen.jitter_offset
        print_json(
            [{**fields_of(each), "run_at": each.scheduled_for + offset if each.fires else None} for each in found]
        )
        return
    print_instants(found, seen.jitter_offset if seen.jitter else None)
    if not found:
        typer.echo("it has no more instants")
    if seen.paused:
        until = f" until {moment(seen.resume_at)}" if seen.resume_at else ""
        typer.echo(f"it is paused{until}: none of these will fire before it is resumed", err=True)


@app.command()
def pause(
    names: Many = None,
    every: Every = False,
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    until: Annotated[str | None, text_option("--until", "Go on then, with its zone.", "INSTANT")] = None,
    delay: Annotated[str | None, time_option("--for", "Go on after that long.")] = None,
    cancel_live: Annotated[bool, typer.Option("--cancel-live", help="Cancel the jobs that it has enqueued.")] = False,
    reason: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Keep schedules from firing. What falls into the pause does not run later; it is recorded as skipped_paused."""
    which = schedule_filter(names, every, handler, owner, name, dry_run=dry_run)
    if which is not None and cancel_live:
        raise typer.BadParameter("goes with names; rota job cancel takes filters", param_hint="--cancel-live")
    if until is not None and delay is not None:
        raise typer.BadParameter("say either --until or --for", param_hint="--until")
    resume_at, later = instant(until, "--until"), duration(delay, "--for")
    if which is not None:
        with using(config_file, dsn, embedded=embedded) as config:
            pause_many(config, which, resume_at or later, reason, dry_run=dry_run, as_json=as_json)
        return
    chosen = list(dict.fromkeys(names or []))

    async def paused(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():  # all that were named, or none
            return [
                await operations.pause_schedule(
                    db, name=name, resume_at=resume_at, delay=later, cancel_live=cancel_live, reason=reason
                )
                for name in chosen
            ]

    with using(config_file, dsn, embedded=embedded) as config:
        changed = ask(config, paused, name="schedule pause")
    say_paused("schedule", chosen, changed, as_json=as_json)


@app.command()
def resume(
    names: Many = None,
    every: Every = False,
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    paused_since: Annotated[
        str | None, text_option("--paused-since", "Only those paused from then on, with its zone.", "INSTANT")
    ] = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Let paused schedules fire again, from their next instant on."""
    since = instant(paused_since, "--paused-since")
    which = schedule_filter(names, every or since is not None, handler, owner, name, dry_run=dry_run)
    if which is not None:
        with using(config_file, dsn, embedded=embedded) as config:
            resume_many(config, which, since, reason, dry_run=dry_run, as_json=as_json)
        return
    chosen = list(dict.fromkeys(names or []))

    async def resumed(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():
            return [await operations.resume_schedule(db, name=name, reason=reason) for name in chosen]

    with using(config_file, dsn, embedded=embedded) as config:
        changed = ask(config, resumed, name="schedule resume")
    say_resumed("schedule", chosen, changed, as_json=as_json)


@app.command("run-now")
def run_now(
    name: Name,
    payload: Annotated[str | None, text_option("--payload", "Another payload, this once.", "JSON")] = None,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job of a schedule at once, paused or not, whatever else runs; print its number."""
    text = given_json(payload, "--payload")

    async def run(db: "Connection") -> int:
        from rota.db import operations

        return await operations.run_schedule_now(db, name=name, payload=text, reason=reason)

    with using(config_file, dsn, embedded=embedded) as config:
        job_id = ask(config, run, name="schedule run-now")
    print_json({"name": name, "job_id": job_id}) if as_json else typer.echo(job_id)


@app.command()
def remove(
    names: Names,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Remove schedules. Their history stays, and so do their live jobs."""
    chosen = list(dict.fromkeys(names))

    async def removed(db: "Connection") -> list[bool]:
        from rota.db import operations, schedule_reports

        declared = []
        async with db.transaction():  # all that were named, or none
            for name in chosen:
                known = await schedule_reports.describe_schedule(db, name=name)
                declared.append(known is not None and known.declared_by is not None)
                await operations.remove_schedule(db, name=name, reason=reason)
        return declared

    with using(config_file, dsn, embedded=embedded) as config:
        declared = ask(config, removed, name="schedule remove")
    print_json({"removed": chosen}) if as_json else None
    for name, by_code in zip(chosen, declared, strict=True):
        if not as_json:
            typer.echo(f"schedule {printable(name)} is removed")
        if by_code:
            typer.echo(
                f"note: {printable(name)} was declared in code: as long as it is, the next start inserts it anew "
                "(pausing holds)",
                err=True,
            )


app.command()(sync)
app.command()(backfill)


async def _warnings(db: "Connection", made: "ScheduleDescription") -> list[str]:
    import asyncpg

    from rota.db import node_reports

    found = []
    try:
        queues = {each.handler: each.queue for each in await node_reports.list_handlers(db)}
        queue = made.queue or queues.get(made.handler) or "default"
        if why := await node_reports.find_why_unclaimed(db, handler=made.handler, queue=queue):
            found.append(why)
        if too_many := await crowded(db, made):
            found.append(too_many)
    except asyncpg.InsufficientPrivilegeError:
        pass  # a client may make schedules, and see no daemons
    return found


def _say_when(made: "ScheduleDescription", warnings: Sequence[str], *, as_json: bool) -> None:
    following = upcoming(made)
    if as_json:
        print_json(
            {
                "name": made.name,
                "schedule_id": made.schedule_id,
                "next_fire_at": following,
                "paused": made.paused,
                "warnings": list(warnings),
            }
        )
        return
    typer.echo(f"{printable(made.name)}: {_explained(made)}")
    if made.paused:
        typer.echo("it is paused")
    else:
        typer.echo(f"next: {relative(following, made.now) or 'never, it has no more instants'}")
    for warning in warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)


def _explained(made: "ScheduleDescription") -> str:
    from rota.cron import Cron

    if made.cron is None:
        return f"Every {age(made.every)}, counted from {moment(made.start_at or made.created_at)}."
    return Cron(made.cron, timezone=made.timezone).explain()
