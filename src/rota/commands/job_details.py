"""Read and print the details of one job: its state, its failed attempts, and when it becomes a dead letter."""

import dataclasses
import json
import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from rota.commands.limit_details import describe_job_limits
from rota.commands.printing import (
    console,
    fields_of,
    format_duration,
    format_instant,
    format_relative,
    plural,
    print_json,
    printable,
    table,
)

if TYPE_CHECKING:
    from rota.db.limit_queries import JobLimit
    from rota.db.node_reports import QueuePosition
    from rota.db.pool import Connection
    from rota.db.reports import JobDescription, JobValues, UnsuccessfulAttempt
    from rota.db.server_reports import RefusedRow

TimeRange = tuple[datetime, datetime]

WAITING_STATES = {"future", "due", "limited", "retrying"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """A job with everything that the commands print about it."""

    job: "JobDescription"
    failed_attempts: Sequence["UnsuccessfulAttempt"]
    values: "JobValues | None"
    """Payload, result and the like, if requested."""
    unclaimed: str | None
    """Why no daemon claims the job."""
    place: "QueuePosition | None" = None
    """The slots and the jobs ahead that a due job waits for."""
    limits: "Sequence[JobLimit]" = ()
    """The limits that apply to a due job."""
    refused: "Sequence[RefusedRow]" = ()
    """Operations of daemons on the job that the database refuses."""
    locked_by: str | None = None
    """The session whose open transaction locks the job's row."""


async def read_job(db: "Connection", job_id: int, *, payload: bool, errors: bool) -> JobDetails:
    """Read the details of a job. Raises RotaError if the id is unknown."""
    from rota.db import limit_queries, node_reports, reports, server_reports
    from rota.db.blockers import find_row_locker
    from rota.errors import RotaError

    job = await reports.describe_job(db, job_id=job_id)
    if job is None:
        raise RotaError(
            f"there is no job {job_id}: the id is wrong, or the job is so old that it was deleted from the ledger"
        )
    unclaimed = place = None
    if job.state in {"due", "limited"} and not job.paused:
        place = await node_reports.find_queue_position(db, job=job)
    if job.state in WAITING_STATES and place is None:
        unclaimed = await node_reports.find_why_unclaimed(db, handler=job.handler, queue=job.queue)
    return JobDetails(
        job=job,
        failed_attempts=await reports.list_attempts(db, job_id=job_id, with_errors=errors),
        values=await reports.read_job_values(db, job_id=job_id) if payload else None,
        unclaimed=unclaimed,
        place=place,
        limits=await limit_queries.find_job_limits(db, job=job) if job.state in {"due", "limited"} else (),
        refused=await server_reports.list_refused_rows(db, job_id=job_id) if job.finished_at is None else (),
        locked_by=await find_row_locker(db, job_id=job_id) if job.state in {*WAITING_STATES, "running"} else None,
    )


def print_job(details: JobDetails, *, errors: bool, as_json: bool) -> None:
    """Print the details as text or JSON."""
    gives_up = give_up_times(details.job)
    if as_json:
        print_json(_as_json(details, gives_up, errors=errors))
        return
    out = console()
    values = {} if details.values is None else dataclasses.asdict(details.values)
    for name, text in [*describe(details, gives_up), *describe_redrives(details.failed_attempts), *values.items()]:
        if text:
            out.print(f"{name:<13}{printable(text)}", soft_wrap=True)
    if details.failed_attempts:
        rows = [
            (
                each.attempt,
                each.outcome,
                each.error_kind,
                format_instant(each.started_at),
                _format_attempt_duration(each),
                str(each.node or "")[:8],
            )
            for each in details.failed_attempts
        ]
        columns = ("attempt#", "outcome", "error…", "started", "took#", "node")
        out.print("\nfailed attempts\n", table(None, *columns, rows=rows))
        if not errors:
            typer.echo("to see the error texts, add --errors", err=True)
    for each in details.failed_attempts if errors else ():
        out.print(f"\nattempt {each.attempt}:\n{printable(each.error) or '(no text)'}", soft_wrap=True)


def _as_json(details: JobDetails, gives_up: TimeRange | None, *, errors: bool) -> dict[str, Any]:
    shown = fields_of(details.job)
    shown["unclaimed"] = details.unclaimed
    shown["locked_by"] = details.locked_by
    shown["place"] = details.place
    shown["limits"] = [
        {**fields_of(limit.state), "open": limit.state.is_open, "ahead": limit.ahead, "more": limit.more}
        for limit in details.limits
    ]
    shown["refused"] = details.refused
    shown["gives_up"] = gives_up and {"earliest": gives_up[0], "latest": gives_up[1]}
    shown["attempts"] = [
        {name: value for name, value in dataclasses.asdict(each).items() if errors or name != "error"}
        for each in details.failed_attempts
    ]
    if details.values is not None:
        shown |= {name: text and _parse_json(text) for name, text in dataclasses.asdict(details.values).items()}
    return shown


def _parse_json(text: str) -> Any:
    def parse_float(digits: str) -> float | str:
        return value if math.isfinite(value := float(digits)) else digits

    try:
        return json.loads(text, parse_float=parse_float)
    except (ValueError, RecursionError):  # for example a number with 5,000 digits
        return text


def describe(details: JobDetails, gives_up: TimeRange | None) -> list[tuple[str, str]]:
    """Return labels and texts. A text is empty if it doesn't apply to the job."""
    job = details.job
    now = job.now
    priority = "" if job.priority is None else f", priority {job.priority}"
    return [
        ("job", f"{job.job_id}  {job.handler}  (queue {job.queue}{priority})"),
        ("state", _format_state(job)),
        ("attempt", _format_attempt(job)),
        ("losses", f"its daemon was lost {plural(job.losses, 'time')}" if job.losses else ""),
        ("last error", job.last_error_kind or ""),
        *(_describe_waiting(job, details.unclaimed) if job.state in WAITING_STATES else []),
        ("limit", describe_job_limits(details.limits)),
        *(_describe_place(details.place, limits=details.limits) if details.place else []),
        ("locked", f"{details.locked_by} locks its row in an open transaction" if details.locked_by else ""),
        *(("refused", _describe_refused(each)) for each in details.refused),
        *(_describe_running(job) if job.state == "running" else []),
        ("gives up", _format_give_up(gives_up, now) if gives_up else ""),
        ("ended", format_relative(job.finished_at, now)),
        ("why", job.note or ""),
        ("first due", format_instant(job.scheduled_for)),
        ("created", f"{format_instant(job.created_at)} by {job.created_by}" if job.created_by else ""),
        ("schedule", "" if job.schedule_id is None else str(job.schedule_id)),
        (
            "unique key",
            (job.unique_key or "") + (", and a new job with it runs after this one" if job.follow_up else ""),
        ),
        ("limit key", job.limit_key or ""),
        ("delivery", "at most once" if job.delivery == "at_most_once" else ""),
        ("do", _format_remedy(job.job_id) if job.state == "dead" else ""),
    ]


def describe_redrives(attempts: "Sequence[UnsuccessfulAttempt]") -> list[tuple[str, str]]:
    """Return a label and a text for each redrive of the job: when, by whom, and why it was dead."""
    return [
        (
            "redriven",
            f"{format_instant(each.redriven_at)} by {each.redriven_by}, dead since {format_instant(each.finished_at)}: "
            + ", ".join(filter(None, (each.dead_reason, each.error_kind))),
        )
        for each in attempts
        if each.redriven_at is not None
    ]


def _format_state(job: "JobDescription") -> str:
    paused = job.paused and job.state in WAITING_STATES
    return ", ".join(
        [job.state, *(["cancel requested"] if job.cancel_requested else []), *(["paused"] if paused else [])]
    )


def _format_attempt(job: "JobDescription") -> str:
    if job.state in WAITING_STATES and not job.attempt:
        return f"none yet, {job.max_attempts} at most"
    limit = f" of {job.max_attempts}" if job.finished_at is None or job.state == "dead" else ""
    return f"{job.attempt}{limit}" + (f", released {plural(job.releases, 'time')}" if job.releases else "")


def _describe_place(place: "QueuePosition", limits: "Sequence[JobLimit]") -> list[tuple[str, str]]:
    """Describe the slots and the jobs ahead, and the daemons that serve the job."""
    slots, taken = sum(node.slots for node in place.nodes), sum(node.taken for node in place.nodes)
    ahead = f"more than {plural(place.ahead, 'job')}" if place.more else plural(place.ahead, "job")
    is_full = taken >= slots
    free = (
        f"all {plural(slots, 'slot')} are taken" if is_full else f"{slots - taken} of {plural(slots, 'slot')} are free"
    )
    text = f"{free}; {ahead} {'is' if place.ahead == 1 else 'are'} ahead"
    if any(not limit.state.is_open for limit in limits):
        text = free if is_full else ""
    elif limits:
        text = f"{free}; keys take turns"
    elif not is_full and not place.ahead:
        text += ": it starts at the next poll, unless another session locks its row"
    shown = ", ".join(
        f"{str(node.node_id)[:8]} on {node.host}:{node.pid} ({node.taken} of {node.slots} taken)"
        for node in place.nodes[:5]
    )
    more = f", and {len(place.nodes) - 5} more" if len(place.nodes) > 5 else ""
    return [("waits", text), ("served by", shown + more)]


def _describe_refused(row: "RefusedRow") -> str:
    return (
        f"for {format_duration(row.age)} the database has refused the operation {row.doing} on this job "
        f"({row.kind} on {row.node}). Correct its values, or the trigger, foreign key or constraint that refuses it"
    )


def _describe_waiting(job: "JobDescription", unclaimed: str | None) -> list[tuple[str, str]]:
    return [
        ("due" if job.state in {"due", "limited"} else "next try", format_relative(job.run_at, job.now)),
        ("unclaimed", unclaimed or ""),
        (
            "expires",
            f"unless started by {format_relative(job.start_by, job.now)}"
            if job.start_by and not job.fence_token
            else "",
        ),
    ]


def _describe_running(job: "JobDescription") -> list[tuple[str, str]]:
    note = f" {job.progress_note}" if job.progress_note else ""
    return [
        ("started", format_relative(job.started_at, job.now)),
        ("lease", f"until {format_relative(job.lease_expires_at, job.now)}, held by node {str(job.node)[:8]}"),
        ("progress", "" if job.progress is None else f"{job.progress:.0%}{note}"),
    ]


def _format_remedy(job_id: int) -> str:
    return f"rota dead redrive {job_id}, or rota dead discard {job_id} --note …"


def give_up_times(job: "JobDescription") -> TimeRange | None:
    """Return the earliest and latest time at which a job becomes a dead letter if every attempt fails. None if it has ended."""
    from rota.domain.forecast import predict_dead_letter

    if job.finished_at is not None or job.run_at is None:
        return None
    running = job.state == "running"
    attempt, at = (job.attempt, job.now) if running else (job.attempt + 1, max(job.run_at, job.now))
    try:
        return predict_dead_letter(
            attempt=attempt,
            at=at,
            max_attempts=job.max_attempts,
            base=job.backoff_base,
            cap=job.backoff_cap,
            deadline=job.scheduled_for + job.retry_for if job.retry_for else None,
        )
    except OverflowError:  # the table's owner can store values that the constraints would reject
        return None


def _format_give_up(times: TimeRange, now: datetime) -> str:
    earliest, latest = times
    if latest - earliest < timedelta(seconds=2):
        return f"at the next failure, expected {format_relative(latest, now)}"
    after = f"{format_duration(earliest - now)} to {format_duration(latest - now)}"
    return f"if all attempts fail: in {after}, by {format_instant(latest)}"


def _format_attempt_duration(each: "UnsuccessfulAttempt") -> str:
    return format_duration(each.finished_at - each.started_at) if each.started_at else ""
