"""`rota job`: look at single jobs, and act on them."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.job_sheet import read_job, show_job
from rota.commands.options import (
    AsJson,
    ConfigFile,
    DryRun,
    Dsn,
    Embedded,
    Handler,
    JobId,
    OneJobId,
    Queue,
    Reason,
    duration,
    instant,
    time_or_age,
)
from rota.commands.schedule_sheet import find_schedule_id
from rota.commands.session import ask, using
from rota.commands.show import age, console, moment, plural, print_json, table

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.reports import ListedJob

app = typer.Typer(name="job", help="Look at jobs and act on them.", no_args_is_help=True)

STATES = ("future", "due", "retrying", "running", "succeeded", "dead", "discarded", "cancelled", "expired")


@app.command("list")
def list_(
    state: Annotated[
        str | None, typer.Option("--state", help=f"One of {', '.join(STATES)}.", show_default=False)
    ] = None,
    handler: Handler = None,
    queue: Queue = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", metavar="NAME", help="Only this schedule's.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Ended or due from then on: an instant, or 2h for 2 hours ago.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Ended or due before that.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")] = 20,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, live and ended, newest first. The time of a running job is when it began."""
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"{state!r} is none of {', '.join(STATES)}", param_hint="--state")

    start, end = time_or_age(since, "--since"), time_or_age(until, "--until")

    async def read(db: "Connection") -> "list[ListedJob]":
        from rota.db import queries, reports

        now = await queries.read_clock(db)
        return await reports.list_jobs(
            db,
            state=state,
            handler=handler,
            queue=queue,
            schedule_id=None if schedule is None else await find_schedule_id(db, schedule),
            since=now - start if isinstance(start, timedelta) else start,
            until=now - end if isinstance(end, timedelta) else end,
            limit=limit,
        )

    with using(config_file, dsn, embedded=embedded) as config:
        found = ask(config, read, name="job list")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            job.job_id,
            job.state,
            f"{job.attempt}/{job.max_attempts}" if job.max_attempts else job.attempt,
            job.handler,
            job.queue,
            _when(job.state, job.run_at, job.started_at, job.finished_at, job.now),
            job.schedule or (f"removed ({job.schedule_id})" if job.schedule_id else ""),
            job.last_error_kind,
        )
        for job in found
    ]
    columns = ("job#", "state", "attempt#", "handler…", "queue…", "when", "schedule…", "last error…")
    console().print(table(None, *columns, rows=rows))
    if len(found) == limit:
        typer.echo(f"the newest {limit}; there may be more: --limit", err=True)


def _when(
    state: str, run_at: datetime | None, started_at: datetime | None, finished_at: datetime | None, now: datetime
) -> str:
    if finished_at is not None:
        return f"{age(now - finished_at)} ago"
    if state == "running" and started_at is not None:
        return f"for {age(now - started_at)}"
    if run_at is None:
        return ""
    return f"in {age(run_at - now)}" if run_at > now else f"since {age(now - run_at)}"


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
    """Say where a job stands, what has been tried, and when it will be given up."""
    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: read_job(db, job_id, payload=payload, errors=errors), name="job show")
    show_job(seen, errors=errors, as_json=as_json)


@app.command()
def cancel(
    job_id: OneJobId = None,
    handler: Handler = None,
    queue: Queue = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="INSTANT", help="Only what is due before.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every live job there is.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End it at once, running or not; its holder can settle nothing.")
    ] = False,
    reason: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Cancel one job, or many by filter: at once if they wait; if they run, their handlers are asked to stop."""
    if every and (handler or queue or before):
        raise typer.BadParameter("goes without --handler, --queue and --before", param_hint="--all")
    filtered = bool(handler or queue or before or every)
    if (job_id is None) is not filtered:
        raise typer.BadParameter("name one job, or else --handler, --queue, --before or --all", param_hint="ID")
    if job_id is None and force:
        raise typer.BadParameter("goes with exactly one ID", param_hint="--force")
    if job_id is not None and dry_run:
        raise typer.BadParameter("goes with filters, not with an ID", param_hint="--dry-run")
    due_before = _FOR_EVER if every else instant(before, "--before")
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db import operations, reports

        if job_id is None and dry_run:
            waiting, running = ask(
                config,
                lambda db: reports.count_live_jobs(db, handler=handler, queue=queue, before=due_before),
                name="job cancel",
            )
            _say_cancelled(waiting, running, as_json=as_json, dry_run=True)
            return
        if job_id is None:
            ended, asked = ask(
                config,
                lambda db: _cancel_all(db, handler=handler, queue=queue, before=due_before, note=reason),
                name="job cancel",
            )
            _say_cancelled(ended, asked, as_json=as_json, dry_run=False)
            return
        became = ask(
            config, lambda db: operations.cancel_job(db, job_id=job_id, force=force, note=reason), name="job cancel"
        )
    said = {
        "cancelled": f"job {job_id} is cancelled",
        "requested": f"job {job_id} runs: its holder is asked to stop (--force ends it at once)",
        "finished": f"job {job_id} had ended before: nothing to cancel",
    }
    print_json({"job_id": job_id, "became": became}) if as_json else typer.echo(said[became])
    if became == "finished":
        raise typer.Exit(1)


_FOR_EVER = datetime.max.replace(tzinfo=UTC)
"""The driver sends this as infinity."""


async def _cancel_all(
    db: "Connection", *, handler: str | None, queue: str | None, before: datetime | None, note: str | None
) -> tuple[int, int]:
    from rota.db import operations

    ended = asked = 0
    while True:
        cancelled, requested = await operations.cancel_jobs(
            db, handler=handler, queue=queue, before=before, limit=operations.BATCH, note=note
        )
        ended, asked = ended + cancelled, asked + requested
        if cancelled + requested < operations.BATCH:
            return ended, asked
        typer.echo(f"{ended:,} cancelled …", err=True)


def _say_cancelled(ended: int, asked: int, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json({**({"dry_run": True} if dry_run else {}), "cancelled": ended, "requested": asked})
    elif dry_run:
        typer.echo(
            f"dry run: {plural(ended, 'job')} would be cancelled, {asked:,} that run asked to stop; nothing was changed"
        )
    else:
        typer.echo(f"{plural(ended, 'job')} cancelled, {asked:,} that run asked to stop")


@app.command("retry-now")
def retry_now(
    job_id: OneJobId = None,
    handler: Handler = None,
    queue: Queue = None,
    every: Annotated[bool, typer.Option("--all", help="Whatever waits for its retry.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")] = 1000,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make jobs that wait for their retry due at once: one, or those of a handler or a queue."""
    filtered = handler is not None or queue is not None or every
    if (job_id is None) is not filtered:
        raise typer.BadParameter("name one job, or else --handler, --queue or --all", param_hint="ID")

    # One call: who fails again within milliseconds would be woken by every further one, until no attempt is left.
    async def wake(db: "Connection") -> int:
        from rota.db import operations

        if job_id is None:
            return await operations.retry_jobs_now(db, handler=handler, queue=queue, limit=limit, note=reason)
        await operations.reschedule_job(db, job_id=job_id, run_at=None, delay=None, note=reason)
        return 1

    with using(config_file, dsn, embedded=embedded) as config:
        woken = ask(config, wake, name="job retry-now")
    print_json({"woken": woken}) if as_json else typer.echo(f"{plural(woken, 'job')} due now")
    if woken == limit and job_id is None:
        typer.echo("there may be more: run it again", err=True)


@app.command()
def reschedule(
    job_id: JobId,
    at: Annotated[
        str | None, typer.Option("--at", metavar="INSTANT", help="When, with its zone.", show_default=False)
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="How long from now.", show_default=False)
    ] = None,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make a waiting job due at another instant. Its idempotency key stays."""
    if (at is None) is (delay is None):
        raise typer.BadParameter("say either --at or --in", param_hint="--at")
    run_at, later = instant(at, "--at"), duration(delay, "--in")
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db.operations import reschedule_job

        due = ask(
            config,
            lambda db: reschedule_job(db, job_id=job_id, run_at=run_at, delay=later, note=reason),
            name="job reschedule",
        )
    print_json({"job_id": job_id, "run_at": due}) if as_json else typer.echo(f"job {job_id} is due {moment(due)}")
