"""`rota why`: explain why a schedule did or didn't fire, or why a job is in its state."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, takes_database
from rota.commands.job_details import JobDetails, describe, describe_redrives, give_up_times, read_job
from rota.commands.options import AsJson, argument, option, parse_job_id
from rota.commands.printing import console, format_instant, print_json, printable
from rota.commands.schedule_details import find_schedule
from rota.commands.why_schedule import Answer, explain_instants, explain_now, explain_removed

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.schedule_reports import FireRecord

JOB_LABELS = (
    "due",
    "next try",
    "limit",
    "waits",
    "served by",
    "unclaimed",
    "locked",
    "attempt",
    "last error",
    "redriven",
    "gives up",
    "started",
    "lease",
    "ended",
    "why",
    "do",
)
"""The lines of `rota job show` that explain a job's state."""


@takes_database
def why(
    database: Database,
    subject: Annotated[str, argument("SCHEDULE|JOB", "Name of a schedule, or id of a job.")],
    at: Annotated[
        str | None, option("--at", "INSTANT", "Explain this instant. Without a time zone, the schedule's zone applies.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a schedule's fire or a job's state.

    Without --at, it explains the state of the schedule and its last instant.
    """
    instant = _parse_instant(at)

    async def work(db: "Connection") -> "list[Answer] | tuple[JobDetails, FireRecord | None]":
        schedule = await find_schedule(db, subject)
        if schedule is None and subject.isdecimal() and instant is None:
            return await _read_job_and_fire(db, parse_job_id(subject))
        if schedule is None:
            return [await explain_removed(db, subject, instant)]
        if instant is None:
            return [await explain_now(db, schedule)]
        return await explain_instants(db, schedule, instant)

    result = database.run(work, name="why")
    if isinstance(result, tuple):
        _print_job(*result, as_json=as_json)
    elif as_json:
        print_json(result[0] if len(result) == 1 else {"answers": result})
    else:
        for answer in result:
            _print_answer(answer)


def _parse_instant(at: str | None) -> datetime | None:
    if at is None:
        return None
    try:
        instant = datetime.fromisoformat(at)
    except ValueError as error:
        raise typer.BadParameter(
            f"{at!r} is not an instant. Write 2026-03-01T09:00:00+01:00, …Z for UTC, or no zone for the schedule's own zone",
            param_hint="--at",
        ) from error
    if not 1900 <= instant.year < 9000:
        raise typer.BadParameter(f"{at!r}: choose a year from 1900 to 8999", param_hint="--at")
    return instant


async def _read_job_and_fire(db: "Connection", job_id: int) -> "tuple[JobDetails, FireRecord | None]":
    """Read a job and the schedule's fire that created it, if any. Raises RotaError if the id is unknown."""
    from rota.db import schedule_reports

    details = await read_job(db, job_id, payload=False, errors=False)
    job = details.job
    if job.schedule_id is None:
        return details, None
    fire = await schedule_reports.find_job_fire(
        db, job_id=job_id, schedule_id=job.schedule_id, scheduled_for=job.scheduled_for
    )
    return details, fire


def _print_job(details: JobDetails, fire: "FireRecord | None", *, as_json: bool) -> None:
    job = details.job
    answer = _explain_job(details, fire)
    if as_json:
        print_json(
            {
                "job_id": job.job_id,
                "verdict": job.state,
                "answer": answer,
                "schedule": fire.name if fire else None,
                "scheduled_for": job.scheduled_for,
                "fire": fire,
            }
        )
        return
    console().print(f"job {job.job_id}: {printable(answer)}", soft_wrap=True)


def _explain_job(details: JobDetails, fire: "FireRecord | None") -> str:
    texts = dict([*describe(details, give_up_times(details.job)), *describe_redrives(details.failed_attempts)[:1]])
    lines = [f"{texts['state']} ({details.job.handler})"]
    if fire is not None:
        origin = (
            "run by hand" if fire.disposition == "run_now" else f"for its instant {format_instant(fire.scheduled_for)}"
        )
        lines.append(f"enqueued by schedule {fire.name}, {origin}" + (f"; {fire.note}" if fire.note else ""))
    lines += [f"{label}: {text}" for label in JOB_LABELS if (text := texts.get(label))]
    return "\n    ".join(lines)


def _print_answer(answer: Answer) -> None:
    out = console()
    at = f" at {format_instant(answer.at)}" if answer.at else ""
    out.print(f"{printable(answer.schedule)}{at}: {printable(answer.answer)}", soft_wrap=True)
    for label, neighbour in (("before", answer.before), ("after", answer.after)):
        if neighbour is not None and answer.at is not None:
            out.print(
                f"    {label:<7}{format_instant(neighbour.scheduled_for)}  {neighbour.became or 'no row'}",
                soft_wrap=True,
            )
