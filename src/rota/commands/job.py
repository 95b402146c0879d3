"""`rota job`: list, show, cancel and reschedule jobs."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, takes_database
from rota.commands.job_details import print_job, read_job
from rota.commands.options import (
    AsJson,
    At,
    Delay,
    DryRun,
    Handler,
    JobId,
    Note,
    OneJobId,
    Queue,
    ShowErrors,
    ShowPayload,
    count_option,
    option,
    parse_duration_option,
    parse_instant,
    time_or_age,
)
from rota.commands.printing import console, format_duration, format_instant, plural, print_json, table
from rota.commands.schedule_details import find_schedule_id

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.reports import ListedJob

app = typer.Typer(name="job", help="List, show, cancel and reschedule jobs.", no_args_is_help=True)

STATES = ("future", "due", "limited", "retrying", "running", "succeeded", "dead", "discarded", "cancelled", "expired")


@app.command("list")
@takes_database
def list_(
    database: Database,
    state: Annotated[str | None, option("--state", "STATE", f"One of {', '.join(STATES)}.")] = None,
    handler: Handler = None,
    queue: Queue = None,
    schedule: Annotated[str | None, option("--schedule", "NAME", "Select only this schedule.")] = None,
    since: Annotated[
        str | None, option("--since", "TIME", "Ended or due since this time: an instant, or 2h for 2 hours ago.")
    ] = None,
    until: Annotated[str | None, option("--until", "TIME", "Ended or due before this time.")] = None,
    limit_key: Annotated[
        str | None, option("--limit-key", "TEXT", "Select only live and dead jobs with this key.")
    ] = None,
    limit: Annotated[int, count_option("Print at most this many jobs.", most=10_000)] = 20,
    as_json: AsJson = False,
) -> None:
    """List live and finished jobs, newest first.

    The time of a running job is the start of its attempt.
    """
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"{state!r} is not one of {', '.join(STATES)}", param_hint="--state")
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
            limit_key=limit_key,
            limit=limit,
        )

    jobs = database.run(read, name="job list")
    if as_json:
        print_json(jobs)
        return
    rows = [
        (
            job.job_id,
            job.state,
            f"{job.attempt}/{job.max_attempts}" if job.max_attempts else job.attempt,
            job.handler,
            job.queue,
            _format_time(job),
            job.schedule or (f"removed ({job.schedule_id})" if job.schedule_id else ""),
            job.last_error_kind,
        )
        for job in jobs
    ]
    columns = ("job#", "state", "attempt#", "handler…", "queue…", "when", "schedule…", "last error…")
    console().print(table(None, *columns, rows=rows))
    if len(jobs) == limit:
        typer.echo(f"these are the newest {limit}. To see more: --limit", err=True)


def _format_time(job: "ListedJob") -> str:
    if job.finished_at is not None:
        return f"{format_duration(job.now - job.finished_at)} ago"
    if job.state == "running" and job.started_at is not None:
        return f"for {format_duration(job.now - job.started_at)}"
    if job.run_at is None:
        return ""
    return (
        f"in {format_duration(job.run_at - job.now)}"
        if job.run_at > job.now
        else f"since {format_duration(job.now - job.run_at)}"
    )


@app.command()
@takes_database
def show(
    database: Database,
    job_id: JobId,
    payload: ShowPayload = False,
    errors: ShowErrors = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a job, its failed attempts, and when it becomes a dead letter."""
    details = database.run(lambda db: read_job(db, job_id, payload=payload, errors=errors), name="job show")
    print_job(details, errors=errors, as_json=as_json)


@app.command()
@takes_database
def cancel(
    database: Database,
    job_id: OneJobId = None,
    handler: Handler = None,
    queue: Queue = None,
    before: Annotated[str | None, option("--before", "INSTANT", "Select only jobs that are due before this.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Select all live jobs.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End the job at once. If it runs, its daemon can't settle it.")
    ] = False,
    note: Note = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Cancel one job, or the jobs that the filters select.

    Waiting jobs end at once. Handlers of running jobs are asked to stop.
    """
    if every and (handler or queue or before):
        raise typer.BadParameter("can't be combined with --handler, --queue or --before", param_hint="--all")
    filtered = bool(handler or queue or before or every)
    if (job_id is None) is not filtered:
        raise typer.BadParameter("give one job id, or --handler, --queue, --before or --all", param_hint="ID")
    if job_id is None and force:
        raise typer.BadParameter("needs exactly one ID", param_hint="--force")
    if job_id is not None and dry_run:
        raise typer.BadParameter("works only with filters, not with an ID", param_hint="--dry-run")
    due_before = _INFINITY if every else parse_instant(before, "--before")
    if job_id is None:

        async def work(db: "Connection") -> tuple[int, int]:
            from rota.db import reports

            if dry_run:
                return await reports.count_live_jobs(db, handler=handler, queue=queue, before=due_before)
            return await _cancel_in_batches(db, handler=handler, queue=queue, before=due_before, note=note)

        cancelled, requested = database.run(work, name="job cancel")
        _print_cancelled(cancelled, requested, as_json=as_json, dry_run=dry_run)
    else:
        _cancel_one(database, job_id, force=force, note=note, as_json=as_json)


def _cancel_one(database: Database, job_id: int, *, force: bool, note: str | None, as_json: bool) -> None:
    from rota.db.operations import cancel_job

    result = database.run(lambda db: cancel_job(db, job_id=job_id, force=force, note=note), name="job cancel")
    texts = {
        "cancelled": f"job {job_id} is cancelled",
        "requested": f"job {job_id} is running, and its handler is asked to stop. To end it at once: --force",
        "finished": f"job {job_id} has already ended, so there is nothing to cancel",
    }
    print_json({"job_id": job_id, "became": result}) if as_json else typer.echo(texts[result])
    if result == "finished":
        raise typer.Exit(1)


_INFINITY = datetime.max.replace(tzinfo=UTC)
"""The driver sends this as PostgreSQL's infinity."""


async def _cancel_in_batches(
    db: "Connection", *, handler: str | None, queue: str | None, before: datetime | None, note: str | None
) -> tuple[int, int]:
    from rota.db import operations

    total_cancelled = total_requested = 0
    while True:
        cancelled, requested = await operations.cancel_jobs(
            db, handler=handler, queue=queue, before=before, limit=operations.BATCH, note=note
        )
        total_cancelled, total_requested = total_cancelled + cancelled, total_requested + requested
        if cancelled + requested < operations.BATCH:
            return total_cancelled, total_requested
        typer.echo(f"{total_cancelled:,} cancelled …", err=True)


def _print_cancelled(cancelled: int, requested: int, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json({**({"dry_run": True} if dry_run else {}), "cancelled": cancelled, "requested": requested})
    elif dry_run:
        typer.echo(
            f"dry run: {plural(cancelled, 'job')} would be cancelled, {requested:,} running asked to stop; nothing was changed"
        )
    else:
        typer.echo(f"{plural(cancelled, 'job')} cancelled, {requested:,} running asked to stop")


@app.command("retry-now")
@takes_database
def retry_now(
    database: Database,
    job_id: OneJobId = None,
    handler: Handler = None,
    queue: Queue = None,
    every: Annotated[bool, typer.Option("--all", help="Select all jobs that wait for a retry.")] = False,
    limit: Annotated[int, count_option("Change at most this many jobs.", most=10_000)] = 1000,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Retry waiting jobs at once: one job, or the jobs of a handler or queue."""
    filtered = handler is not None or queue is not None or every
    if (job_id is None) is not filtered:
        raise typer.BadParameter("give one job id, or --handler, --queue or --all", param_hint="ID")

    # One call, no batches: a job that fails again at once would be retried by each batch until it has no attempt left.
    async def work(db: "Connection") -> int:
        from rota.db import operations

        if job_id is None:
            return await operations.retry_jobs_now(db, handler=handler, queue=queue, limit=limit, note=note)
        await operations.reschedule_job(db, job_id=job_id, run_at=None, delay=None, note=note)
        return 1

    count = database.run(work, name="job retry-now")
    print_json({"woken": count}) if as_json else typer.echo(f"{plural(count, 'job')} due now")
    if count == limit and job_id is None:
        typer.echo("the limit is reached. Run the command again for more jobs", err=True)


@app.command()
@takes_database
def reschedule(
    database: Database,
    job_id: JobId,
    at: At = None,
    delay: Delay = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Run a waiting job at another time.

    The job keeps its unique key.
    """
    if (at is None) is (delay is None):
        raise typer.BadParameter("give either --at or --in", param_hint="--at")
    from rota.db.operations import reschedule_job

    run_at, delay_time = parse_instant(at, "--at"), parse_duration_option(delay, "--in")
    due = database.run(
        lambda db: reschedule_job(db, job_id=job_id, run_at=run_at, delay=delay_time, note=note),
        name="job reschedule",
    )
    print_json({"job_id": job_id, "run_at": due}) if as_json else typer.echo(
        f"job {job_id} is due {format_instant(due)}"
    )
