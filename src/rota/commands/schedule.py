"""`rota schedule`: add, change, list, show and remove schedules."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.cron import print_instants
from rota.commands.database import Database, takes_database
from rota.commands.enqueue import HandlerName, read_json
from rota.commands.options import (
    After,
    AsJson,
    Handler,
    NamePattern,
    Note,
    Owner,
    ScheduleName,
    argument,
    count_option,
    like_pattern,
    option,
    parse_instant,
)
from rota.commands.printing import (
    console,
    fields_of,
    format_distance,
    format_duration,
    format_instant,
    format_relative,
    plural,
    print_json,
    printable,
    table,
)
from rota.commands.schedule_backfill import backfill
from rota.commands.schedule_details import find_crowding, next_fire, print_schedule, read_details, read_schedule
from rota.commands.schedule_options import RESETTABLE, Payload, takes_columns
from rota.commands.schedule_pause import pause, resume
from rota.commands.schedule_sync import sync

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.schedule_reports import ListedSchedule, ScheduleDescription

app = typer.Typer(name="schedule", help="Add, change, list, pause and remove schedules.", no_args_is_help=True)

STATES = ("ok", "invalid", "paused", "overdue", "ended", "silent")


@app.command()
@takes_database
@takes_columns
def add(
    database: Database,
    name: ScheduleName,
    handler: HandlerName,
    columns: dict[str, Any],
    payload: Payload = None,
    paused: Annotated[bool, typer.Option("--paused", help="Add it paused. To start it: rota schedule resume.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a schedule, and print when it fires next."""
    from rota.errors import RotaError

    if ("cron" in columns) is ("every" in columns):
        raise typer.BadParameter("give either --cron or --every", param_hint="--cron")
    text = read_json(payload, "--payload")

    async def insert(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations

        row = json.dumps({**columns, "name": name, "handler": handler, "paused": paused})
        if await operations.add_schedule(db, columns=row, payload=text) is None:
            raise RotaError(f"the schedule {name!r} already exists. To change it: rota schedule set")
        schedule = await read_schedule(db, name)
        return schedule, await _find_warnings(db, schedule)

    schedule, warnings = database.run(insert, name="schedule add")
    _print_next_fire(schedule, warnings, as_json=as_json)


@app.command("set")
@takes_database
@takes_columns
def set_(
    database: Database,
    name: ScheduleName,
    columns: dict[str, Any],
    handler: Annotated[str | None, option("--handler", "NAME", "Name of the handler to run.")] = None,
    payload: Payload = None,
    default: Annotated[list[str] | None, option("--default", "COLUMN", "Reset this column to its default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change some options of a schedule.

    The change itself fires nothing: the next instant is after the edit.
    """
    if {"cron", "every"} <= columns.keys():
        raise typer.BadParameter("give either --cron or --every", param_hint="--cron")
    if handler is not None:
        columns["handler"] = handler
    for column in default or []:
        if column not in RESETTABLE:
            raise typer.BadParameter(f"{column!r} is not one of {', '.join(RESETTABLE)}", param_hint="--default")
        columns.setdefault(column, None)
    if "cron" in columns:
        columns["every"] = None
    elif "every" in columns:
        columns["cron"] = None
    text = "{}" if payload is None and "payload" in columns else read_json(payload, "--payload")
    if not columns and text is None:
        raise typer.BadParameter("give at least one option to change, such as --cron or --timezone", param_hint="NAME")

    async def edit(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations
        from rota.domain.schedule import check_rule

        before = await read_schedule(db, name)
        if columns.keys() & {"cron", "every", "timezone", "dst_gap", "dst_fold"}:
            check_rule({"cron": before.cron, "timezone": before.timezone} | columns)
        await operations.edit_schedule(db, name=name, columns=json.dumps(columns), payload=text)
        schedule = await read_schedule(db, name)
        return schedule, await _find_warnings(db, schedule)

    schedule, warnings = database.run(edit, name="schedule set")
    _print_next_fire(schedule, warnings, as_json=as_json)


@app.command("list")
@takes_database
def list_(
    database: Database,
    handler: Handler = None,
    owner: Owner = None,
    name: NamePattern = None,
    state: Annotated[
        str | None, option("--state", "STATE", f"One of {', '.join(STATES)} (no success in time).")
    ] = None,
    limit: Annotated[int, count_option("Print at most this many schedules.", most=100_000)] = 1000,
    as_json: AsJson = False,
) -> None:
    """List schedules with their next fire, state and last success."""
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"{state!r} is not one of {', '.join(STATES)}", param_hint="--state")
    from rota.db.schedule_reports import ScheduleFilter, list_schedules

    which = ScheduleFilter(handler=handler, owner=owner, name_like=like_pattern(name))
    schedules = database.run(lambda db: list_schedules(db, which=which, state=state, limit=limit), name="schedule list")
    if as_json:
        print_json(schedules)
        return
    rows = [
        (
            each.name,
            f"{each.cron} {each.timezone}" if each.cron else f"every {format_duration(each.every)}",
            each.handler,
            each.state,
            format_distance(each.next_fire_at, each.now),
            format_distance(each.last_success_at, each.now) or "never",
            _format_problem(each),
        )
        for each in schedules
    ]
    # Only the columns that fit 80 characters: the instants are in --json and `rota schedule show`.
    columns = ("name~", "when~", "handler~", "state", "next#", "success#", "~")
    console().print(table(None, *columns, rows=rows))
    if len(schedules) == limit:
        typer.echo(f"these are the first {limit:,}. To see more: --limit", err=True)


def _format_problem(each: "ListedSchedule") -> str:
    failed = f"failed {plural(each.consecutive_failures, 'time')}" if each.consecutive_failures else ""
    return each.invalid_reason or ", ".join(filter(None, (failed, "no success in time" if each.silent else "")))


@app.command()
@takes_database
def show(
    database: Database,
    name: ScheduleName,
    payload: Annotated[bool, typer.Option("--payload", help="Also show the payload of its jobs.")] = False,
    fires: Annotated[
        int, typer.Option("--fires", metavar="COUNT", min=0, max=10_000, help="Show this many of its last fires.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a schedule, and the outcome of its last instants."""
    details = database.run(lambda db: read_details(db, name, fires=fires), name="schedule show")
    print_schedule(details, payload=payload, as_json=as_json)


@app.command()
@takes_database
def preview(
    database: Database,
    name: ScheduleName,
    after: After = None,
    count: Annotated[int, count_option("Number of instants.", flag="--count", most=10_000)] = 5,
    as_json: AsJson = False,
) -> None:
    """List the next instants of a schedule, in UTC and in its own time zone.

    Gaps, folds and jitter are marked.
    """
    start = parse_instant(after, "--after")
    schedule = database.run(lambda db: read_schedule(db, name), name="schedule preview")
    from rota.domain import preview as domain_preview

    instants = domain_preview.preview(schedule.rule, start or schedule.now, count)
    if as_json:
        offset = schedule.jitter_offset
        print_json(
            [{**fields_of(each), "run_at": each.scheduled_for + offset if each.fires else None} for each in instants]
        )
        return
    print_instants(instants, schedule.jitter_offset if schedule.jitter else None)
    if not instants:
        typer.echo(f"{printable(name)} has no later instants")
    if schedule.paused:
        until = f" until {format_instant(schedule.resume_at)}" if schedule.resume_at else ""
        typer.echo(f"{printable(name)} is paused{until}. Instants during the pause will not fire", err=True)


@app.command("run-now")
@takes_database
def run_now(
    database: Database,
    name: ScheduleName,
    payload: Annotated[str | None, option("--payload", "JSON", "Use this payload for this job only.")] = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job of a schedule now, and print its id.

    This ignores a pause and the overlap setting.
    """
    text = read_json(payload, "--payload")

    async def run(db: "Connection") -> int:
        from rota.db import operations

        return await operations.run_schedule_now(db, name=name, payload=text, reason=note)

    job_id = database.run(run, name="schedule run-now")
    print_json({"name": name, "job_id": job_id}) if as_json else typer.echo(job_id)


@app.command()
@takes_database
def remove(
    database: Database,
    names: Annotated[list[str], argument("NAME", "Names of the schedules.")],
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Remove schedules.

    Their history and their live jobs stay.
    """
    unique_names = list(dict.fromkeys(names))

    async def work(db: "Connection") -> list[bool]:
        from rota.db import operations, schedule_reports

        declared = []
        async with db.transaction():  # all schedules or none
            for name in unique_names:
                schedule = await schedule_reports.describe_schedule(db, name=name)
                declared.append(schedule is not None and schedule.declared_by is not None)
                await operations.remove_schedule(db, name=name, reason=note)
        return declared

    declared = database.run(work, name="schedule remove")
    print_json({"removed": unique_names}) if as_json else None
    for name, is_declared in zip(unique_names, declared, strict=True):
        if not as_json:
            typer.echo(f"schedule {printable(name)} is removed")
        if is_declared:
            typer.echo(
                f"note: {printable(name)} is declared in code, so the next start of its app adds it again. Remove it from the "
                "code, or pause it instead",
                err=True,
            )


for command in (pause, resume, backfill, sync):
    app.command()(command)


async def _find_warnings(db: "Connection", schedule: "ScheduleDescription") -> list[str]:
    import asyncpg

    from rota.db import node_reports

    warnings = []
    try:
        queues = {each.handler: each.queue for each in await node_reports.list_handlers(db)}
        queue = schedule.queue or queues.get(schedule.handler) or "default"
        if why := await node_reports.find_why_unclaimed(db, handler=schedule.handler, queue=queue):
            warnings.append(why)
        if crowding := await find_crowding(db, schedule):
            warnings.append(crowding)
    except asyncpg.InsufficientPrivilegeError:
        pass  # a member of rota_client may add schedules but not see daemons
    return warnings


def _print_next_fire(schedule: "ScheduleDescription", warnings: Sequence[str], *, as_json: bool) -> None:
    fires_at = next_fire(schedule)
    if as_json:
        print_json(
            {
                "name": schedule.name,
                "schedule_id": schedule.schedule_id,
                "next_fire_at": fires_at,
                "paused": schedule.paused,
                "warnings": list(warnings),
            }
        )
        return
    typer.echo(f"{printable(schedule.name)}: {_explain(schedule)}")
    if schedule.paused:
        typer.echo("it is paused")
    else:
        typer.echo(f"next: {format_relative(fires_at, schedule.now) or 'never, it has no later instants'}")
    for warning in warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)


def _explain(schedule: "ScheduleDescription") -> str:
    from rota.cron import Cron

    if schedule.cron is None:
        return f"Every {format_duration(schedule.every)}, counted from {format_instant(schedule.start_at or schedule.created_at)}."
    return Cron(schedule.cron, timezone=schedule.timezone).explain()
