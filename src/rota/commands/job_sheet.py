"""What is shown of one job: where it stands, what has been tried, and when it will be given up."""

import dataclasses
import json
import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from rota.commands.show import age, console, fields_of, moment, plural, print_json, printable, relative, table

if TYPE_CHECKING:
    from rota.db.node_reports import QueuePosition
    from rota.db.pool import Connection
    from rota.db.reports import JobDescription, JobValues, UnsuccessfulAttempt
    from rota.db.server_reports import RefusedRow

Span = tuple[datetime, datetime]

WAITING = {"future", "due", "retrying"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A job, its attempts that did not succeed, what it carries if that was asked for, and why nobody claims it."""

    job: "JobDescription"
    tried: Sequence["UnsuccessfulAttempt"]
    values: "JobValues | None"
    unclaimed: str | None
    place: "QueuePosition | None" = None
    """What a due job waits for."""
    refused: "Sequence[RefusedRow]" = ()
    """The daemons' operations on the job that the database refuses."""
    locked_by: str | None = None
    """The session whose open transaction has the job's row locked."""


async def read_job(db: "Connection", job_id: int, *, payload: bool, errors: bool) -> Sheet:
    """Read what there is to show of a job. Raises RotaError for one that nobody knows."""
    from rota.db import node_reports, reports, server_reports
    from rota.db.blockers import find_row_locker
    from rota.errors import RotaError

    job = await reports.describe_job(db, job_id=job_id)
    if job is None:
        raise RotaError(
            f"there is no job {job_id}: the number is wrong, or it ended longer ago than the ledger is kept"
        )
    unclaimed = place = None
    if job.state == "due" and not job.paused:
        place = await node_reports.find_queue_position(db, job=job)
    if job.state in WAITING and place is None:
        unclaimed = await node_reports.find_why_unclaimed(db, handler=job.handler, queue=job.queue)
    return Sheet(
        job=job,
        tried=await reports.list_attempts(db, job_id=job_id, with_errors=errors),
        values=await reports.read_job_values(db, job_id=job_id) if payload else None,
        unclaimed=unclaimed,
        place=place,
        refused=await server_reports.list_refused_rows(db, job_id=job_id) if job.finished_at is None else (),
        locked_by=await find_row_locker(db, job_id=job_id) if job.state in {*WAITING, "running"} else None,
    )


def show_job(seen: Sheet, *, errors: bool, as_json: bool) -> None:
    """Print it, for people or as JSON."""
    gives_up = give_up(seen.job)
    if as_json:
        print_json(_as_json(seen, gives_up, errors=errors))
        return
    out = console()
    values = {} if seen.values is None else dataclasses.asdict(seen.values)
    for name, text in [*facts(seen, gives_up), *redrives(seen.tried), *values.items()]:
        if text:
            out.print(f"{name:<13}{printable(text)}", soft_wrap=True)
    if seen.tried:
        rows = [
            (
                each.attempt,
                each.outcome,
                each.error_kind,
                moment(each.started_at),
                _took(each),
                str(each.node or "")[:8],
            )
            for each in seen.tried
        ]
        columns = ("attempt#", "outcome", "error…", "started", "took#", "node")
        out.print("\nattempts that did not succeed\n", table(None, *columns, rows=rows))
        if not errors:
            typer.echo("what the errors said: the same command with --errors", err=True)
    for each in seen.tried if errors else ():
        out.print(f"\nattempt {each.attempt}:\n{printable(each.error) or '(no text)'}", soft_wrap=True)


def _as_json(seen: Sheet, gives_up: Span | None, *, errors: bool) -> dict[str, Any]:
    shown = fields_of(seen.job)
    shown["unclaimed"] = seen.unclaimed
    shown["locked_by"] = seen.locked_by
    shown["place"] = seen.place
    shown["refused"] = seen.refused
    shown["gives_up"] = gives_up and {"earliest": gives_up[0], "latest": gives_up[1]}
    shown["attempts"] = [
        {name: value for name, value in dataclasses.asdict(each).items() if errors or name != "error"}
        for each in seen.tried
    ]
    if seen.values is not None:
        shown |= {name: text and _value(text) for name, text in dataclasses.asdict(seen.values).items()}
    return shown


def _value(text: str) -> Any:
    def number(digits: str) -> float | str:
        return value if math.isfinite(value := float(digits)) else digits

    try:
        return json.loads(text, parse_float=number)
    except (ValueError, RecursionError):  # a number of 5,000 digits is JSON, too
        return text


def facts(seen: Sheet, gives_up: Span | None) -> list[tuple[str, str]]:
    """Describe the job in lines: a name and a text each, empty where there is nothing to say."""
    job = seen.job
    now = job.now
    priority = "" if job.priority is None else f", priority {job.priority}"
    return [
        ("job", f"{job.job_id}  {job.handler}  (queue {job.queue}{priority})"),
        ("state", _state(job)),
        ("attempt", _attempt(job)),
        ("losses", f"its worker was lost {plural(job.losses, 'time')}" if job.losses else ""),
        ("last error", job.last_error_kind or ""),
        *(_waiting(job, seen.unclaimed) if job.state in WAITING else []),
        *(_in_line(seen.place) if seen.place else []),
        ("locked", f"{seen.locked_by} has its row locked in an open transaction" if seen.locked_by else ""),
        *(("refused", _refused(each)) for each in seen.refused),
        *(_running(job) if job.state == "running" else []),
        ("gives up", _span(gives_up, now) if gives_up else ""),
        ("ended", relative(job.finished_at, now)),
        ("why", job.note or ""),
        ("first due", moment(job.scheduled_for)),
        ("made", f"{moment(job.created_at)} by {job.created_by}" if job.created_by else ""),
        ("schedule", "" if job.schedule_id is None else str(job.schedule_id)),
        ("unique key", job.unique_key or ""),
        ("delivery", "at most once" if job.delivery == "at_most_once" else ""),
        ("do", _remedy(job.job_id) if job.state == "dead" else ""),
    ]


def redrives(tried: "Sequence[UnsuccessfulAttempt]") -> list[tuple[str, str]]:
    """Return a line for each time that the job was redriven: when, by whom, and from what."""
    return [
        (
            "redriven",
            f"{moment(each.redriven_at)} by {each.redriven_by}, dead since {moment(each.finished_at)}: "
            + ", ".join(filter(None, (each.dead_reason, each.error_kind))),
        )
        for each in tried
        if each.redriven_at is not None
    ]


def _state(job: "JobDescription") -> str:
    paused = job.paused and job.state in WAITING
    return ", ".join(
        [job.state, *(["cancel requested"] if job.cancel_requested else []), *(["paused"] if paused else [])]
    )


def _attempt(job: "JobDescription") -> str:
    if job.state in WAITING and not job.attempt:
        return f"none yet, {job.max_attempts} at most"
    of = f" of {job.max_attempts}" if job.finished_at is None or job.state == "dead" else ""
    return f"{job.attempt}{of}" + (f", released {plural(job.releases, 'time')}" if job.releases else "")


def _in_line(place: "QueuePosition") -> list[tuple[str, str]]:
    """Say what a due job waits for, and which daemons serve it."""
    slots, taken = sum(node.slots for node in place.nodes), sum(node.taken for node in place.nodes)
    count = f"more than {plural(place.ahead, 'job')}" if place.more else plural(place.ahead, "job")
    full = taken >= slots
    free = f"all {plural(slots, 'slot')} are taken" if full else f"{slots - taken} of {plural(slots, 'slot')} are free"
    waits = f"{free}; {count} {'is' if place.ahead == 1 else 'are'} ahead"
    if not full and not place.ahead:
        waits += ": it starts at the next poll, unless another session has its row locked"
    shown = ", ".join(
        f"{str(node.node_id)[:8]} on {node.host}:{node.pid} ({node.taken} of {node.slots} taken)"
        for node in place.nodes[:5]
    )
    more = f", and {len(place.nodes) - 5} more" if len(place.nodes) > 5 else ""
    return [("waits", waits), ("served by", shown + more)]


def _refused(row: "RefusedRow") -> str:
    return (
        f"the database refuses the daemons' {row.doing} of it, for {age(row.age)} ({row.kind} on {row.node}): correct its "
        "values, or the trigger, foreign key or constraint that refuses it"
    )


def _waiting(job: "JobDescription", unclaimed: str | None) -> list[tuple[str, str]]:
    return [
        ("due" if job.state == "due" else "next try", relative(job.run_at, job.now)),
        ("but", unclaimed or ""),
        (
            "expires",
            f"unless begun by {relative(job.start_by, job.now)}" if job.start_by and not job.fence_token else "",
        ),
    ]


def _running(job: "JobDescription") -> list[tuple[str, str]]:
    note = f" {job.progress_note}" if job.progress_note else ""
    return [
        ("started", relative(job.started_at, job.now)),
        ("lease", f"until {relative(job.lease_expires_at, job.now)}, held by node {str(job.node)[:8]}"),
        ("progress", "" if job.progress is None else f"{job.progress:.0%}{note}"),
    ]


def _remedy(job_id: int) -> str:
    return f"rota dead redrive {job_id}, or rota dead discard {job_id} --note …"


def give_up(job: "JobDescription") -> Span | None:
    """Return when at the earliest and the latest a job that goes on failing becomes a dead letter; None for one that has ended."""
    from rota.domain.forecast import given_up

    if job.finished_at is not None or job.run_at is None:
        return None
    running = job.state == "running"
    attempt, at = (job.attempt, job.now) if running else (job.attempt + 1, max(job.run_at, job.now))
    try:
        return given_up(
            attempt=attempt,
            at=at,
            max_attempts=job.max_attempts,
            base=job.backoff_base,
            cap=job.backoff_cap,
            deadline=job.scheduled_for + job.retry_for if job.retry_for else None,
        )
    except OverflowError:  # an owner's row, past the constraints
        return None


def _span(span: Span, now: datetime) -> str:
    earliest, latest = span
    if latest - earliest < timedelta(seconds=2):
        return f"at the next failure, {relative(latest, now)} or when it comes"
    return f"if all attempts fail: in {age(earliest - now)} to {age(latest - now)}, by {moment(latest)}"


def _took(each: "UnsuccessfulAttempt") -> str:
    return age(each.finished_at - each.started_at) if each.started_at else ""
