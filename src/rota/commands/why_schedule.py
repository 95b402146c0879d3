"""Explain what happened at an instant of a schedule, by its fires and its current rule."""

import dataclasses
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from rota.commands.printing import format_duration, format_instant, plural
from rota.commands.schedule_details import describe_pause, read_schedule

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.schedule_reports import FireRecord, ScheduleDescription

CAUSES = {
    "skipped_misfire": "it was missed",
    "skipped_overlap": "an earlier job of the schedule was still live",
    "skipped_gap": "the clock skipped it, and dst_gap is skip",
    "skipped_paused": "the schedule was paused",
    "skipped_edit": "the schedule was edited before the instant was decided",
    "skipped_deleted": "the schedule was removed",
    "replaced": "a later instant replaced it while it waited",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The instant before or after the explained one, and its outcome."""

    scheduled_for: datetime
    became: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of an instant, or the state of the schedule if `at` is None.

    `verdict` is the disposition of the fire. Without a fire it is the reason why there is none.
    """

    schedule: str
    at: datetime | None
    verdict: str
    answer: str
    job_id: int | None = None
    job_state: str | None = None
    fire: "FireRecord | None" = None
    before: Neighbour | None = None
    after: Neighbour | None = None


async def explain_instants(db: "Connection", schedule: "ScheduleDescription", at: datetime) -> list[Answer]:
    """Explain an instant. Local time that the clock shows twice is two instants, with an answer each."""
    if (answer := _explain_skipped_time(at, schedule)) is not None:
        return [answer]
    return [await _explain_instant(db, schedule, each) for each in _instants_at(at, schedule)]


def _explain_skipped_time(at: datetime, schedule: "ScheduleDescription") -> Answer | None:
    """Answer for local time that the clock skips, unless the cron expression matches it."""
    from rota.cron import zone
    from rota.domain.preview import matches_local_time, moments_of_local_time

    if at.tzinfo is not None or schedule.cron is None or schedule.state == "invalid":
        return None
    jump = moments_of_local_time(at, schedule.timezone)[0]
    if jump.astimezone(zone(schedule.timezone)).replace(tzinfo=None) == at or matches_local_time(schedule.rule, at):
        return None
    text = f"it is not due then: the clock skips {at:%H:%M} at {format_instant(jump)}, and the schedule does not match that time"
    return Answer(schedule=schedule.name, at=jump, verdict="not_due", answer=text)


def _instants_at(at: datetime, schedule: "ScheduleDescription") -> list[datetime]:
    from rota.domain.preview import moments_of_local_time

    instants = [at] if at.tzinfo is not None else moments_of_local_time(at, schedule.timezone)
    return [_with_fraction(each, schedule) for each in instants]


def _with_fraction(at: datetime, schedule: "ScheduleDescription") -> datetime:
    # Instants of --every may have a fraction of a second, which is not printed. Restore it for an instant copied from the output.
    if schedule.every is None or at.microsecond:
        return at
    next_instant = schedule.rule.first_after(at - timedelta(microseconds=1))
    return next_instant if next_instant is not None and next_instant < at + timedelta(seconds=1) else at


async def _explain_instant(db: "Connection", schedule: "ScheduleDescription", at: datetime) -> Answer:
    from rota.db import schedule_reports
    from rota.errors import InvalidCron

    fire = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=at)
    try:
        if fire is not None and not _is_between_instants(schedule, fire, at):
            return _explain_fire(fire, at)
        return await _explain_without_fire(db, schedule, at)
    except InvalidCron as error:
        return Answer(schedule=schedule.name, at=at, verdict="invalid", answer=f"the schedule is invalid: {error}")


def _is_between_instants(schedule: "ScheduleDescription", fire: "FireRecord", at: datetime) -> bool:
    """Return whether `at` is within a row of missed instants but not one of them. False if the schedule was edited since."""
    if (
        fire.missed_from is None
        or at in {fire.missed_from, fire.scheduled_for}
        or schedule.edited_at > fire.missed_from
    ):
        return False
    return schedule.rule.first_after(at - timedelta(microseconds=1)) != at


def _explain_fire(fire: "FireRecord", at: datetime) -> Answer:
    verdict = fire.disposition
    fields: dict[str, Any] = {"schedule": fire.name, "at": at, "fire": fire}
    is_earlier_missed = fire.missed_from is not None and at < fire.scheduled_for
    if is_earlier_missed and fire.job_id is not None:
        text = f"it did not run: only the last of several missed instants, {format_instant(fire.scheduled_for)}, was {fire.note}"
        return Answer(**fields, verdict="skipped", answer=text)
    if verdict in {"enqueued", "run_now"}:
        origin = "run by hand" if verdict == "run_now" else f"enqueued {_format_lateness(fire)}"
        state = fire.job_state or "no longer in the ledger"
        text = f"{origin} as job {fire.job_id}, which is {state}"
        return Answer(
            **fields, verdict=verdict, answer=_add_note(text, fire), job_id=fire.job_id, job_state=fire.job_state
        )
    if verdict == "waiting":
        return Answer(**fields, verdict=verdict, answer="it waits until the schedule's earlier job has ended")
    text = f"it did not run: {CAUSES.get(verdict, verdict)}"
    if fire.missed_from is not None:
        number = plural(fire.missed_count, "instant") if fire.missed_count else "instants"
        text += f" (one row for {number}, {format_instant(fire.missed_from)} to {format_instant(fire.scheduled_for)})"
    return Answer(**fields, verdict=verdict, answer=_add_note(text, fire))


def _format_lateness(fire: "FireRecord") -> str:
    lateness = fire.decided_at - fire.scheduled_for
    return "on time" if lateness < timedelta(seconds=1) else f"{format_duration(lateness)} after its instant"


def _add_note(text: str, fire: "FireRecord") -> str:
    return f"{text}. {fire.note}" if fire.note else text


async def _explain_without_fire(db: "Connection", schedule: "ScheduleDescription", at: datetime) -> Answer:
    """Explain an instant without a fire by the schedule's current rule."""
    from rota.db import schedule_reports
    from rota.domain.preview import adjacent_instants, first_pass_of_fold, instant

    before, after = adjacent_instants(schedule.rule, at)
    adjacent: dict[str, Any] = {}
    for name, each in (("before", before), ("after", after)):
        if each is not None:
            fire = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=each)
            adjacent[name] = Neighbour(scheduled_for=each, became=_format_outcome(fire, each, schedule))
    preview = instant(schedule.rule, at)
    verdict, text = _explain_missing_fire(schedule, at) if preview.fires else ("not_due", "it is not due then")
    if verdict == "not_due" and schedule.created_at < at <= schedule.edited_at:
        text += f" by the current rule, which is in effect since {format_instant(schedule.edited_at)}; no row exists for it either"
    if (first := first_pass_of_fold(schedule.rule, at)) is not None:
        fire = await schedule_reports.find_fire(db, schedule_id=schedule.schedule_id, at=first)
        text += (
            f": the clock shows {preview.local:%H:%M} twice, and with dst_fold = first the schedule fires only the first time, at "
            f"{format_instant(first)} ({_format_outcome(fire, first, schedule) or 'no row'}). To fire both times: "
            f"rota schedule set {schedule.name} --fold both"
        )
    elif preview.note:
        text += f" ({preview.note})"
    return Answer(schedule=schedule.name, at=at, verdict=verdict, answer=text, **adjacent)


def _format_outcome(fire: "FireRecord | None", at: datetime, schedule: "ScheduleDescription") -> str | None:
    if fire is None:
        return "to come" if at > schedule.now else None
    has_own_job = fire.scheduled_for == at and fire.job_id is not None
    return fire.disposition + (f", job {fire.job_id}" if has_own_job else "")


def _explain_missing_fire(schedule: "ScheduleDescription", at: datetime) -> tuple[str, str]:
    """Return the verdict and the text for an instant of the rule that has no fire."""
    if schedule.state == "invalid":
        return "invalid", f"the schedule is invalid and does not fire: {schedule.invalid_reason}"
    if schedule.paused and at > (schedule.paused_at or at) and (schedule.resume_at is None or at < schedule.resume_at):
        return "paused", f"the schedule is {describe_pause(schedule)}"
    if at > schedule.now:
        return "future", f"it is due then, in {format_duration(at - schedule.now)}"
    if at <= schedule.created_at:
        return (
            "before_creation",
            f"the schedule did not exist yet: it was created {format_instant(schedule.created_at)}",
        )
    if at <= schedule.edited_at:
        return (
            "before_edit",
            f"no row exists: the schedule had another rule until its edit at {format_instant(schedule.edited_at)}, or was paused",
        )
    if schedule.last_fire_at is not None and at <= schedule.last_fire_at:
        return "forgotten", "its row has been deleted: fires are kept for a limited time (retention.fires)"
    return "undecided", "it is due, but no daemon has decided about it yet. To see living daemons: rota status"


async def explain_now(db: "Connection", schedule: "ScheduleDescription") -> Answer:
    """Describe the state of a schedule, and the outcome of its last instant."""
    from rota.db import schedule_reports
    from rota.db.blockers import find_row_locker

    locked_by = await find_row_locker(db, schedule_id=schedule.schedule_id) if schedule.state == "overdue" else None
    fires = await schedule_reports.list_fires(db, schedule_id=schedule.schedule_id, limit=1)
    fields: dict[str, Any] = {"schedule": schedule.name, "at": None, "fire": fires[0] if fires else None}
    if schedule.next_fire_at is not None and schedule.state in {"ok", "overdue"}:
        fields["after"] = Neighbour(scheduled_for=schedule.next_fire_at, became="to come")
    if fires:
        last = _explain_fire(fires[0], fires[0].scheduled_for)
        fields["before"] = Neighbour(scheduled_for=fires[0].scheduled_for, became=fires[0].disposition)
        fields |= {"job_id": last.job_id, "job_state": last.job_state}
        history = f"Its last instant, {format_instant(fires[0].scheduled_for)}: {last.answer}"
    else:
        history = "It has not fired yet"
    if schedule.consecutive_failures:
        failed = plural(schedule.consecutive_failures, "job")
        history += f". Its last {failed} failed: rota dead list --handler {schedule.handler}"
    if schedule.silent:
        history += f". It has not succeeded within the expected {format_duration(schedule.expect_success_within)}"
    return Answer(**fields, verdict=schedule.state, answer=f"{_describe_state(schedule, locked_by)}. {history}")


def _describe_state(schedule: "ScheduleDescription", locked_by: str | None) -> str:
    match schedule.state:
        case "paused":
            return f"it is {describe_pause(schedule)}"
        case "invalid":
            return f"it is invalid and does not fire: {schedule.invalid_reason}"
        case "ended":
            return "it has no later instants" + (
                f": it ended {format_instant(schedule.end_at)}" if schedule.end_at else ""
            )
        case "overdue":
            cause = (
                f"{locked_by} locks its row in an open transaction"
                if locked_by
                else "to see living daemons: rota status"
            )
            return f"it is overdue, because no daemon has decided about its next instant: {cause}"
        case _:
            return f"it is ok, and its next instant is {format_instant(schedule.next_fire_at) or 'not planned yet'}"


async def explain_removed(db: "Connection", name: str, at: datetime | None) -> Answer:
    """Explain an instant of a removed schedule by its fires. Raises RotaError for a name without fires."""
    from rota.db import schedule_reports

    schedule_id = await schedule_reports.find_removed_schedule(db, name=name)
    if schedule_id is None:
        return await explain_now(db, await read_schedule(db, name))
    if at is None:
        last = (await schedule_reports.list_fires(db, schedule_id=schedule_id, limit=1))[0]
        outcome = _explain_fire(last, last.scheduled_for).answer
        text = f"the schedule was removed. Its last instant, {format_instant(last.scheduled_for)}: {outcome}"
        return Answer(schedule=name, at=None, verdict="removed", answer=text, fire=last)
    if at.tzinfo is None:
        raise typer.BadParameter(
            "needs a time zone, because the schedule was removed. Add Z for UTC", param_hint="--at"
        )
    fire = await schedule_reports.find_fire(db, schedule_id=schedule_id, at=at)
    if fire is not None:
        return _explain_fire(fire, at)
    return Answer(
        schedule=name, at=at, verdict="removed", answer="the schedule was removed, and no row exists for this instant"
    )
