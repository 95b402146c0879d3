"""Read and print the details of one schedule: when it fires, its state, and the outcome of its last instants."""

import dataclasses
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

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
    from collections.abc import Sequence

    from rota.db.pool import Connection
    from rota.db.schedule_reports import FireRecord, ScheduleDescription

JITTER_ADVICE = "distribute them with jitter: rota schedule set NAME --jitter 5m"

MAX_NAMES = 10_000
"""Maximum number of names that are searched for one similar to an unknown name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDetails:
    """A schedule and its last fires."""

    schedule: "ScheduleDescription"
    fires: "Sequence[FireRecord]"
    locked_by: str | None
    """The session whose open transaction locks the clock of an overdue schedule."""


async def read_schedule(db: "Connection", name: str) -> "ScheduleDescription":
    """Read a schedule. Raises RotaError for an unknown name, with a similar name as a suggestion."""
    from difflib import get_close_matches

    from rota.db import schedule_reports
    from rota.errors import RotaError

    schedule = await find_schedule(db, name)
    if schedule is None:
        close = get_close_matches(name, await schedule_reports.list_schedule_names(db, limit=MAX_NAMES), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ". To see all names: rota schedule list"
        raise RotaError(f"there is no schedule {name!r}{hint}")
    return schedule


async def find_schedule(db: "Connection", name: str) -> "ScheduleDescription | None":
    """Read a schedule, and who paused it. Returns None for an unknown name."""
    from contextlib import suppress

    import asyncpg

    from rota.db import schedule_reports

    schedule = await schedule_reports.describe_schedule(db, name=name)
    if schedule is not None and schedule.paused_at is not None:
        # A member of rota_client may pause schedules but not read the audit log.
        with suppress(asyncpg.InsufficientPrivilegeError):
            by, reason = await schedule_reports.find_pause(db, name=name, since=schedule.paused_at)
            return dataclasses.replace(schedule, paused_by=by, pause_reason=reason)
    return schedule


async def find_schedule_id(db: "Connection", name: str) -> int:
    """Return the id of a schedule, which may be removed. Raises RotaError for an unknown name."""
    from rota.db import schedule_reports

    if (schedule := await schedule_reports.describe_schedule(db, name=name)) is not None:
        return schedule.schedule_id
    if (removed := await schedule_reports.find_removed_schedule(db, name=name)) is not None:
        return removed
    return (await read_schedule(db, name)).schedule_id


async def read_details(db: "Connection", name: str, *, fires: int) -> ScheduleDetails:
    """Read a schedule and its last fires, at most `fires` of them. Raises RotaError for an unknown name."""
    from rota.db import schedule_reports
    from rota.db.blockers import find_row_locker

    schedule = await read_schedule(db, name)
    last = await schedule_reports.list_fires(db, schedule_id=schedule.schedule_id, limit=fires) if fires else []
    locked_by = await find_row_locker(db, schedule_id=schedule.schedule_id) if schedule.state == "overdue" else None
    return ScheduleDetails(schedule=schedule, fires=last, locked_by=locked_by)


async def find_crowding(db: "Connection", schedule: "ScheduleDescription") -> str | None:
    """Return a warning if too many schedules fire at the same instant as this one."""
    from rota.db import schedule_reports

    fires_at = next_fire(schedule)
    if schedule.jitter or fires_at is None:
        return None
    count = await schedule_reports.count_crowd(db, at=fires_at, cron=schedule.cron, timezone=schedule.timezone)
    if count <= schedule_reports.CROWD_SIZE:
        return None
    return f"{plural(count, 'schedule')} without jitter fire together at {format_instant(fires_at)}: {JITTER_ADVICE}"


def next_fire(schedule: "ScheduleDescription") -> datetime | None:
    """Return the next instant, as a daemon plans it. None if the schedule is paused or has no later instants."""
    if schedule.paused:
        return None
    return schedule.next_fire_at or schedule.rule.first_after(
        max(schedule.edited_at, schedule.last_fire_at or schedule.edited_at)
    )


def print_schedule(details: ScheduleDetails, *, payload: bool, as_json: bool) -> None:
    """Print the details as text or JSON."""
    import json

    schedule = details.schedule
    if as_json:
        shown = fields_of(schedule)
        for name in ("payload", "meta", "declared"):
            shown[name] = json.loads(shown[name]) if shown[name] else None
        if not payload:
            del shown["payload"]
        print_json({**shown, "locked_by": details.locked_by, "fires": details.fires})
        return
    out = console()
    locked = f"{details.locked_by} locks its row in an open transaction" if details.locked_by else ""
    for name, text in [*describe(schedule), ("locked", locked), *([("payload", schedule.payload)] if payload else [])]:
        if text:
            out.print(f"{name:<14}{printable(text)}", soft_wrap=True)
    if details.fires:
        rows = [
            (format_instant(each.scheduled_for), each.disposition, each.job_id, each.job_state, _format_fire_note(each))
            for each in details.fires
        ]
        out.print("\nlast instants\n", table(None, "instant", "outcome", "job#", "job state", "…", rows=rows))


def _format_fire_note(fire: "FireRecord") -> str:
    missed = ""
    if fire.missed_from is not None:
        count = plural(fire.missed_count, "instant") if fire.missed_count else "instants"
        missed = f"{count} since {format_instant(fire.missed_from)}"
    return "; ".join(filter(None, (missed, fire.note)))


def describe(each: "ScheduleDescription") -> list[tuple[str, str]]:
    """Return labels and texts. A text is empty if it doesn't apply to the schedule."""
    now = each.now
    return [
        ("schedule", f"{each.name}  (number {each.schedule_id})"),
        ("purpose", each.description or ""),
        ("owner", each.owner or ""),
        ("when", _format_rule(each)),
        ("runs", f"{each.handler}{f' in queue {each.queue}' if each.queue else ''}, priority {each.priority}"),
        ("state", _format_state(each)),
        ("next", _format_next_fire(each)),
        ("last fire", format_relative(each.last_fire_at, now)),
        ("last success", format_relative(each.last_success_at, now) or "never"),
        ("failures", f"{each.consecutive_failures} in a row" if each.consecutive_failures else ""),
        ("expected", _format_expectation(each)),
        ("misfire", _format_misfire(each)),
        ("overlap", each.overlap),
        ("dst gap", "" if each.cron is None else f"{each.dst_gap} (fold: {each.dst_fold})"),
        (
            "jitter",
            f"up to {format_duration(each.jitter)}; this schedule runs {_format_exactly(each.jitter_offset)} later"
            if each.jitter
            else "",
        ),
        (
            "active",
            " to ".join([format_instant(each.start_at), format_instant(each.end_at)])
            if each.start_at or each.end_at
            else "",
        ),
        ("job settings", _format_job_settings(each)),
        ("created", f"{format_instant(each.created_at)} by {each.created_by}"),
        ("edited", format_instant(each.edited_at) if each.edited_at > each.created_at else ""),
        ("declared by", each.declared_by or ""),
    ]


def _format_rule(each: "ScheduleDescription") -> str:
    from rota.cron import Cron
    from rota.errors import InvalidCron

    if each.cron is None:
        anchor = format_instant(each.start_at or each.created_at)
        return f"every {_format_exactly(each.every or timedelta(0))}, counted from {anchor}"
    try:
        text = Cron(each.cron, timezone=each.timezone).explain()
    except InvalidCron as error:
        text = str(error)
    return f"{each.cron}  ({text})"


def _format_state(each: "ScheduleDescription") -> str:
    if each.state == "paused":
        return describe_pause(each)
    if each.state == "invalid":
        return f"invalid: {each.invalid_reason}"
    if each.state == "overdue":
        return "overdue: no daemon has decided about its next instant. To see living daemons: rota node list"
    return "ended: it has no later instants" if each.state == "ended" else each.state


def describe_pause(each: "ScheduleDescription") -> str:
    """Describe a pause: since when, by whom, until when and why."""
    by = f" by {each.paused_by}" if each.paused_by else ""
    until = f", until {format_instant(each.resume_at)}" if each.resume_at else ""
    why = f": {each.pause_reason}" if each.pause_reason else ""
    return f"paused since {format_instant(each.paused_at)}{by}{until}{why}"


def _format_next_fire(each: "ScheduleDescription") -> str:
    if each.next_fire_at is None:
        return "not planned yet; the next living daemon plans it" if each.state in {"ok", "overdue"} else ""
    local = "" if each.timezone == "UTC" else f", {_format_local_time(each.next_fire_at, each.timezone)}"
    return f"{format_relative(each.next_fire_at, each.now)}{local}"


def _format_local_time(at: datetime, timezone: str) -> str:
    from rota.cron import zone
    from rota.errors import InvalidCron

    try:
        return f"{at.astimezone(zone(timezone)):%H:%M:%S %Z}"
    except InvalidCron:
        return ""


def _format_expectation(each: "ScheduleDescription") -> str:
    if each.expect_success_within is None:
        return ""
    late = ", but it has not succeeded in time" if each.silent else ""
    return f"a success within {format_duration(each.expect_success_within)}{late}"


def _format_misfire(each: "ScheduleDescription") -> str:
    limit = f", at most {each.catch_up_limit}" if each.misfire == "all" else ""
    late = f", none older than {format_duration(each.too_late_after)}" if each.too_late_after else ""
    tolerance = format_duration(each.on_time_within)
    return f"{each.misfire}{limit} (an instant is missed if it is handled more than {tolerance} late){late}"


def _format_job_settings(each: "ScheduleDescription") -> str:
    settings = {
        "attempts": each.max_attempts,
        "backoff from": each.backoff_base and format_duration(each.backoff_base),
        "backoff up to": each.backoff_cap and format_duration(each.backoff_cap),
        "retry for": each.retry_for and format_duration(each.retry_for),
        "timeout": each.timeout and format_duration(each.timeout),
        "lease": each.lease and format_duration(each.lease),
        "delivery": each.delivery,
        "start within": each.start_within and format_duration(each.start_within),
        "limit key": each.limit_key,
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value)


def _format_exactly(value: timedelta) -> str:
    return format_duration(value) if not value % timedelta(seconds=1) else f"{value.total_seconds():.3f}s"
