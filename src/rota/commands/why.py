"""`rota why`: why a schedule fired or did not, why a job runs or does not; answered from what is stored."""

import dataclasses
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.job_sheet import Sheet, facts, give_up, read_job, redrives
from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, job_id
from rota.commands.schedule_sheet import find_schedule, paused, the_schedule
from rota.commands.session import ask, using
from rota.commands.show import age, console, moment, plural, print_json, printable

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.schedule_reports import FireRecord, ScheduleDescription

CAUSES = {
    "skipped_misfire": "it was missed",
    "skipped_overlap": "an earlier job of the schedule was still live",
    "skipped_gap": "the clock jumped over it, and dst_gap is skip",
    "skipped_paused": "the schedule was paused",
    "skipped_edit": "the schedule was edited before it was decided",
    "skipped_deleted": "the schedule was removed",
    "replaced": "a later instant took its place while it waited",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The instant before or after the one asked about, and what became of it."""

    scheduled_for: datetime
    became: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one instant of a schedule, or how the schedule is. `verdict` is a disposition, or what takes its place."""

    schedule: str
    at: datetime | None
    verdict: str
    answer: str
    job_id: int | None = None
    job_state: str | None = None
    fire: "FireRecord | None" = None
    before: Neighbour | None = None
    after: Neighbour | None = None


def why(
    subject: Annotated[str, typer.Argument(metavar="SCHEDULE|JOB", show_default=False, help="A name, or a number.")],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="INSTANT",
            show_default=False,
            help="Which instant; without a zone, on the schedule's clock.",
        ),
    ] = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Say what became of a schedule's instant and why, or why a job is where it is."""
    asked = _reading(at)

    async def look(db: "Connection") -> "list[Answer] | tuple[Sheet, FireRecord | None]":
        found = await find_schedule(db, subject)
        if found is None and subject.isdecimal() and asked is None:
            return await _job(db, job_id(subject))
        if found is None:
            return await _gone(db, subject, asked)
        if asked is None:
            return [await _now(db, found)]
        if (jumped := _jumped_over(asked, found)) is not None:
            return [jumped]
        return [await _then(db, found, each) for each in _moments(asked, found)]

    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, look, name="why")
    if isinstance(seen, tuple):
        _show_job(*seen, as_json=as_json)
    elif as_json:
        print_json(seen[0] if len(seen) == 1 else {"answers": seen})
    else:
        for each in seen:
            _show(each)


def _reading(at: str | None) -> datetime | None:
    if at is None:
        return None
    try:
        asked = datetime.fromisoformat(at)
        if not 1900 <= asked.year < 9000:
            raise typer.BadParameter(f"{at!r}: choose a year from 1900 to 8999", param_hint="--at")
        return asked
    except ValueError as error:
        raise typer.BadParameter(
            f"{at!r} is no instant: write 2026-03-01T09:00:00+01:00, …Z for UTC, or no zone for the schedule's own clock",
            param_hint="--at",
        ) from error


def _jumped_over(asked: datetime, schedule: "ScheduleDescription") -> Answer | None:
    """Answer for a reading that the clock jumps over and the schedule doesn't name: at the jump it may be due for another one."""
    from rota.cron import zone
    from rota.domain.preview import moments, names_reading

    if asked.tzinfo is not None or schedule.cron is None or schedule.state == "invalid":
        return None
    jump = moments(asked, schedule.timezone)[0]
    if jump.astimezone(zone(schedule.timezone)).replace(tzinfo=None) == asked or names_reading(schedule.rule, asked):
        return None
    said = f"it is not due then: the clock jumps over {asked:%H:%M} at {moment(jump)}, and the schedule does not name that time"
    return Answer(schedule=schedule.name, at=jump, verdict="not_due", answer=said)


def _moments(asked: datetime, schedule: "ScheduleDescription") -> list[datetime]:
    """Return what was asked for: two moments where the schedule's clock shows it twice."""
    from rota.domain.preview import moments

    read = [asked] if asked.tzinfo is not None else moments(asked, schedule.timezone)
    return [_to_the_second(each, schedule) for each in read]


def _to_the_second(at: datetime, schedule: "ScheduleDescription") -> datetime:
    # Instants are shown to the second, and `every` counts from a fraction of one: what was copied must be found again.
    if schedule.every is None or at.microsecond:
        return at
    following = schedule.rule.first_after(at - timedelta(microseconds=1))
    return following if following is not None and following < at + timedelta(seconds=1) else at


async def _then(db: "Connection", schedule: "ScheduleDescription", at: datetime) -> Answer:
    from rota.db import schedule_reports
    from rota.errors import InvalidCron

    fire = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=at)
    try:
        if fire is not None and not _is_between_instants(schedule, fire, at):
            return _recorded(fire, at)
        return await _unrecorded(db, schedule, at)
    except InvalidCron as error:
        return Answer(schedule=schedule.name, at=at, verdict="invalid", answer=f"the schedule is invalid: {error}")


def _is_between_instants(schedule: "ScheduleDescription", fire: "FireRecord", at: datetime) -> bool:
    """Return whether a missed stretch covers `at` without having it as an instant. False if the schedule was another then."""
    if (
        fire.missed_from is None
        or at in {fire.missed_from, fire.scheduled_for}
        or schedule.edited_at > fire.missed_from
    ):
        return False
    return schedule.rule.first_after(at - timedelta(microseconds=1)) != at


def _recorded(fire: "FireRecord", at: datetime) -> Answer:
    verdict = fire.disposition
    known: dict[str, Any] = {"schedule": fire.name, "at": at, "fire": fire}
    inside = fire.missed_from is not None and at < fire.scheduled_for
    if inside and fire.job_id is not None:
        said = f"it did not run: one of a stretch whose last instant, {moment(fire.scheduled_for)}, was {fire.note}"
        return Answer(**known, verdict="skipped", answer=said)
    if fire.disposition in {"enqueued", "run_now"}:
        how = "asked for by hand" if fire.disposition == "run_now" else f"enqueued {_late(fire)}"
        state = fire.job_state or "no longer known: it ended longer ago than the ledger is kept"
        said = f"{how} as job {fire.job_id}, which is {state}"
        return Answer(**known, verdict=verdict, answer=_noted(said, fire), job_id=fire.job_id, job_state=fire.job_state)
    if fire.disposition == "waiting":
        return Answer(**known, verdict=verdict, answer="it waits until the schedule's earlier job has ended")
    said = f"it did not run: {CAUSES.get(verdict, verdict)}"
    if fire.missed_from is not None:
        number = plural(fire.missed_count, "instant") if fire.missed_count else "instants"
        said += f" (one row for {number}, {moment(fire.missed_from)} to {moment(fire.scheduled_for)})"
    return Answer(**known, verdict=verdict, answer=_noted(said, fire))


def _late(fire: "FireRecord") -> str:
    late = fire.decided_at - fire.scheduled_for
    return "on time" if late < timedelta(seconds=1) else f"{age(late)} after its instant"


def _noted(said: str, fire: "FireRecord") -> str:
    return f"{said}. {fire.note}" if fire.note else said


async def _unrecorded(db: "Connection", schedule: "ScheduleDescription", at: datetime) -> Answer:
    """Answer where no row does: by the schedule as it is now."""
    from rota.db import schedule_reports
    from rota.domain.preview import first_pass, instant, neighbours

    before, after = neighbours(schedule.rule, at)
    around: dict[str, Any] = {}
    for name, each in (("before", before), ("after", after)):
        if each is not None:
            row = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=each)
            around[name] = Neighbour(scheduled_for=each, became=_became(row, each, schedule))
    here = instant(schedule.rule, at)
    verdict, said = ("not_due", "it is not due then") if not here.fires else _why_no_row(schedule, at)
    if verdict == "not_due" and at <= schedule.edited_at and at > schedule.created_at:
        said += f" by the rule that the schedule has had since its edit at {moment(schedule.edited_at)}; no row records it either"
    if (other := first_pass(schedule.rule, at)) is not None:
        row = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=other)
        became = _became(row, other, schedule) or "no row"
        said += (
            f": the clock shows {here.local:%H:%M} twice, and dst_fold is first, so it fires the first time only, at "
            f"{moment(other)} ({became}). To fire both times: rota schedule set {schedule.name} --fold both"
        )
    elif here.note:
        said += f" ({here.note})"
    return Answer(schedule=schedule.name, at=at, verdict=verdict, answer=said, **around)


def _became(fire: "FireRecord | None", at: datetime, schedule: "ScheduleDescription") -> str | None:
    if fire is None:
        return "to come" if at > schedule.now else None
    own = fire.scheduled_for == at
    return fire.disposition + (f", job {fire.job_id}" if own and fire.job_id is not None else "")


def _why_no_row(schedule: "ScheduleDescription", at: datetime) -> tuple[str, str]:
    if schedule.state == "invalid":
        return "invalid", f"the schedule is invalid and stands still: {schedule.invalid_reason}"
    if schedule.paused and at > (schedule.paused_at or at) and (schedule.resume_at is None or at < schedule.resume_at):
        return "paused", f"the schedule is {paused(schedule)}"
    if at > schedule.now:
        return "future", f"it is due then, in {age(at - schedule.now)}"
    if at <= schedule.created_at:
        return "before_creation", f"the schedule did not exist: it was made {moment(schedule.created_at)}"
    if at <= schedule.edited_at:
        return (
            "before_edit",
            f"no row tells of it: the schedule was another until its edit at {moment(schedule.edited_at)}, or it was paused",
        )
    if schedule.last_fire_at is not None and at <= schedule.last_fire_at:
        return "forgotten", "no row tells of it any more: fires are kept for a limited time (retention.fires)"
    return "undecided", "it is due, and nobody has decided about it yet: is a daemon alive? See rota status"


async def _now(db: "Connection", schedule: "ScheduleDescription") -> Answer:
    """Say how the schedule is, and what became of its last instant."""
    from rota.db import schedule_reports
    from rota.db.blockers import find_row_locker

    last = await schedule_reports.list_fires(db, schedule_id=schedule.schedule_id, limit=1)
    known: dict[str, Any] = {"schedule": schedule.name, "at": None, "fire": last[0] if last else None}
    if schedule.next_fire_at is not None and schedule.state in {"ok", "overdue"}:
        known["after"] = Neighbour(scheduled_for=schedule.next_fire_at, became="to come")
    if last:
        was = _recorded(last[0], last[0].scheduled_for)
        known["before"] = Neighbour(scheduled_for=last[0].scheduled_for, became=last[0].disposition)
        then = f"Its last instant, {moment(last[0].scheduled_for)}: {was.answer}"
        known |= {"job_id": was.job_id, "job_state": was.job_state}
    else:
        then = "It has not fired yet"
    match schedule.state:
        case "paused":
            said = f"it is {paused(schedule)}"
        case "invalid":
            said = f"it is invalid and stands still: {schedule.invalid_reason}"
        case "ended":
            said = "it has no more instants" + (f": it ended {moment(schedule.end_at)}" if schedule.end_at else "")
        case "overdue":
            locked_by = await find_row_locker(db, schedule_id=schedule.schedule_id)
            said = "an instant has come and nobody decides about it: " + (
                f"{locked_by} has its row locked in an open transaction"
                if locked_by
                else "is a daemon alive? See rota status"
            )
        case _:
            ahead = moment(schedule.next_fire_at) or "being planned"
            said = f"it is in order, its next instant is {ahead}"
    if schedule.consecutive_failures:
        then += f". Its last {plural(schedule.consecutive_failures, 'job')} failed: rota dead list --handler {schedule.handler}"
    if schedule.silent:
        then += f". It has not succeeded within the expected {age(schedule.expect_success_within)}"
    return Answer(**known, verdict=schedule.state, answer=f"{said}. {then}")


async def _gone(db: "Connection", name: str, asked: datetime | None) -> list[Answer]:
    """Answer for a schedule that was removed: its fires outlive it. Raises RotaError where none of the last ones is its."""
    from rota.db import schedule_reports

    gone = await schedule_reports.find_removed_schedule(db, name=name)
    if gone is None:
        return [await _now(db, await the_schedule(db, name))]
    last = await schedule_reports.list_fires(db, schedule_id=gone, limit=1)
    if asked is None:
        was = _recorded(last[0], last[0].scheduled_for)
        said = f"there is no such schedule any more. Its last instant, {moment(last[0].scheduled_for)}: {was.answer}"
        return [Answer(schedule=name, at=None, verdict="removed", answer=said, fire=last[0])]
    at = _zoned(asked)
    fire = await schedule_reports.find_fire(db, schedule_id=gone, at=at)
    if fire is not None:
        return [_recorded(fire, at)]
    return [
        Answer(schedule=name, at=at, verdict="removed", answer="there is no such schedule any more, and no row tells")
    ]


def _zoned(asked: datetime) -> datetime:
    if asked.tzinfo is None:
        raise typer.BadParameter("names no zone, and the schedule that had one is gone: add Z", param_hint="--at")
    return asked


async def _job(db: "Connection", job_id: int) -> "tuple[Sheet, FireRecord | None]":
    from rota.db import schedule_reports

    seen = await read_job(db, job_id, payload=False, errors=False)
    fire = None
    if seen.job.schedule_id is not None:
        fire = await schedule_reports.find_job_fire(
            db, job_id=job_id, schedule_id=seen.job.schedule_id, scheduled_for=seen.job.scheduled_for
        )
    return seen, fire


def _show_job(seen: Sheet, fire: "FireRecord | None", *, as_json: bool) -> None:
    answer = _job_answer(seen, fire)
    if as_json:
        print_json(
            {
                "job_id": seen.job.job_id,
                "verdict": seen.job.state,
                "answer": answer,
                "schedule": fire.name if fire else None,
                "scheduled_for": seen.job.scheduled_for,
                "fire": fire,
            }
        )
        return
    console().print(f"job {seen.job.job_id}: {printable(answer)}", soft_wrap=True)


def _job_answer(seen: Sheet, fire: "FireRecord | None") -> str:
    lines = dict([*facts(seen, give_up(seen.job)), *redrives(seen.tried)[:1]])
    parts = [f"{lines['state']} ({seen.job.handler})"]
    if fire is not None:
        how = "asked for by hand" if fire.disposition == "run_now" else f"for its instant {moment(fire.scheduled_for)}"
        parts.append(f"made by schedule {fire.name}, {how}" + (f"; {fire.note}" if fire.note else ""))
    more = (
        "due",
        "next try",
        "waits",
        "served by",
        "but",
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
    parts += [f"{name}: {text}" for name in more if (text := lines.get(name))]
    return "\n    ".join(parts)


def _show(each: Answer) -> None:
    out = console()
    at = f" at {moment(each.at)}" if each.at else ""
    out.print(f"{printable(each.schedule)}{at}: {printable(each.answer)}", soft_wrap=True)
    for word, near in (("before", each.before), ("after", each.after)):
        if near is not None and each.at is not None:
            out.print(f"    {word:<7}{moment(near.scheduled_for)}  {near.became or 'no row'}", soft_wrap=True)
