"""What is shown of one schedule: when it fires, how it is, and what became of its last instants."""

import dataclasses
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rota.commands.show import age, console, fields_of, moment, plural, print_json, printable, relative, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.pool import Connection
    from rota.db.schedule_reports import FireRecord, ScheduleDescription

SPREAD = "spread them, rota schedule set NAME --jitter 5m"

KNOWN = 10_000
"""Most names among which a likely one is looked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A schedule and its last fires."""

    schedule: "ScheduleDescription"
    fires: "Sequence[FireRecord]"
    locked_by: str | None
    """The session whose open transaction has the row of an overdue schedule's clock locked."""


async def the_schedule(db: "Connection", name: str) -> "ScheduleDescription":
    """Read a schedule. Raises RotaError for one that isn't there, with the name that was probably meant."""
    from difflib import get_close_matches

    from rota.db import schedule_reports
    from rota.errors import RotaError

    found = await find_schedule(db, name)
    if found is None:
        close = get_close_matches(name, await schedule_reports.list_schedule_names(db, limit=KNOWN), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ". rota schedule list shows them all"
        raise RotaError(f"there is no schedule {name!r}{hint}")
    return found


async def find_schedule(db: "Connection", name: str) -> "ScheduleDescription | None":
    """Read a schedule, and who paused it; None where there is none of that name."""
    from contextlib import suppress

    import asyncpg

    from rota.db import schedule_reports

    found = await schedule_reports.describe_schedule(db, name=name)
    if found is not None and found.paused_at is not None:
        with suppress(asyncpg.InsufficientPrivilegeError):  # a client may pause its schedules, and not read the audit
            by, reason = await schedule_reports.find_pause(db, name=name, since=found.paused_at)
            return dataclasses.replace(found, paused_by=by, pause_reason=reason)
    return found


async def find_schedule_id(db: "Connection", name: str) -> int:
    """Return a schedule's id, also of a removed one. Raises RotaError for an unknown name."""
    from rota.db import schedule_reports

    if (found := await schedule_reports.describe_schedule(db, name=name)) is not None:
        return found.schedule_id
    if (removed := await schedule_reports.find_removed_schedule(db, name=name)) is not None:
        return removed
    return (await the_schedule(db, name)).schedule_id


async def read_schedule(db: "Connection", name: str, *, fires: int) -> Sheet:
    """Read what there is to show of a schedule."""
    from rota.db import schedule_reports
    from rota.db.blockers import find_row_locker

    found = await the_schedule(db, name)
    last = await schedule_reports.list_fires(db, schedule_id=found.schedule_id, limit=fires) if fires else []
    locked_by = await find_row_locker(db, schedule_id=found.schedule_id) if found.state == "overdue" else None
    return Sheet(schedule=found, fires=last, locked_by=locked_by)


async def crowded(db: "Connection", made: "ScheduleDescription") -> str | None:
    """Say that too many schedules fire at the instant at which this one fires next."""
    from rota.db import schedule_reports

    following = upcoming(made)
    if made.jitter or following is None:
        return None
    count = await schedule_reports.count_crowd(db, at=following, cron=made.cron, timezone=made.timezone)
    if count <= schedule_reports.CROWD:
        return None
    return f"{plural(count, 'schedule')} without jitter fire together at {moment(following)}: {SPREAD}"


def upcoming(made: "ScheduleDescription") -> datetime | None:
    """Return when it fires next, as a daemon will plan it."""
    if made.paused:
        return None
    return made.next_fire_at or made.rule.first_after(max(made.edited_at, made.last_fire_at or made.edited_at))


def show_schedule(seen: Sheet, *, payload: bool, as_json: bool) -> None:
    """Print it, for people or as JSON."""
    import json

    schedule = seen.schedule
    if as_json:
        shown = fields_of(schedule)
        for name in ("payload", "meta", "declared"):
            shown[name] = json.loads(shown[name]) if shown[name] else None
        if not payload:
            del shown["payload"]
        print_json({**shown, "locked_by": seen.locked_by, "fires": seen.fires})
        return
    out = console()
    locked = f"{seen.locked_by} has its row locked in an open transaction" if seen.locked_by else ""
    for name, text in [*facts(schedule), ("locked", locked), *([("payload", schedule.payload)] if payload else [])]:
        if text:
            out.print(f"{name:<14}{printable(text)}", soft_wrap=True)
    if seen.fires:
        rows = [
            (moment(each.scheduled_for), each.disposition, each.job_id, each.job_state, _told(each))
            for each in seen.fires
        ]
        out.print("\nlast instants\n", table(None, "instant", "became", "job#", "which is", "…", rows=rows))


def _told(fire: "FireRecord") -> str:
    stretch = ""
    if fire.missed_from is not None:
        how_many = plural(fire.missed_count, "instant") if fire.missed_count else "instants"
        stretch = f"{how_many} from {moment(fire.missed_from)} on"
    return "; ".join(filter(None, (stretch, fire.note)))


def facts(each: "ScheduleDescription") -> list[tuple[str, str]]:
    """Say it in lines: a name and a text each, empty where there is nothing to say."""
    now = each.now
    return [
        ("schedule", f"{each.name}  (number {each.schedule_id})"),
        ("what for", each.description or ""),
        ("owner", each.owner or ""),
        ("when", _when(each)),
        ("runs", f"{each.handler}{f' in queue {each.queue}' if each.queue else ''}, priority {each.priority}"),
        ("state", _state(each)),
        ("next", _next(each)),
        ("last fire", relative(each.last_fire_at, now)),
        ("last success", relative(each.last_success_at, now) or "never"),
        ("failures", f"{each.consecutive_failures} in a row" if each.consecutive_failures else ""),
        ("watched", _watched(each)),
        ("missed ones", _misfire(each)),
        ("overlap", each.overlap),
        ("in the gap", "" if each.cron is None else f"{each.dst_gap} (fold: {each.dst_fold})"),
        (
            "jitter",
            f"up to {age(each.jitter)}; this one runs {_exact(each.jitter_offset)} later" if each.jitter else "",
        ),
        (
            "from, until",
            " to ".join([moment(each.start_at), moment(each.end_at)]) if each.start_at or each.end_at else "",
        ),
        ("job terms", _terms(each)),
        ("made", f"{moment(each.created_at)} by {each.created_by}"),
        ("edited", moment(each.edited_at) if each.edited_at > each.created_at else ""),
        ("declared by", each.declared_by or ""),
    ]


def _when(each: "ScheduleDescription") -> str:
    from rota.cron import Cron
    from rota.errors import InvalidCron

    if each.cron is None:
        return f"every {_exact(each.every or timedelta(0))}, counted from {moment(each.start_at or each.created_at)}"
    try:
        said = Cron(each.cron, timezone=each.timezone).explain()
    except InvalidCron as error:
        said = str(error)
    return f"{each.cron}  ({said})"


def _state(each: "ScheduleDescription") -> str:
    if each.state == "paused":
        return paused(each)
    if each.state == "invalid":
        return f"invalid: {each.invalid_reason}"
    if each.state == "overdue":
        return "overdue: its instant has come, and nobody decides: is a daemon alive?"
    return "at its end" if each.state == "ended" else each.state


def paused(each: "ScheduleDescription") -> str:
    """Say of one that is paused since when, by whom, until when and why."""
    by = f" by {each.paused_by}" if each.paused_by else ""
    until = f", until {moment(each.resume_at)}" if each.resume_at else ""
    why = f": {each.pause_reason}" if each.pause_reason else ""
    return f"paused since {moment(each.paused_at)}{by}{until}{why}"


def _next(each: "ScheduleDescription") -> str:
    if each.next_fire_at is None:
        return "to be planned, by the first daemon that looks" if each.state in {"ok", "overdue"} else ""
    local = "" if each.timezone == "UTC" else f", {_local(each.next_fire_at, each.timezone)}"
    return f"{relative(each.next_fire_at, each.now)}{local}"


def _local(at: datetime, timezone: str) -> str:
    from rota.cron import zone
    from rota.errors import InvalidCron

    try:
        return f"{at.astimezone(zone(timezone)):%H:%M:%S %Z}"
    except InvalidCron:
        return ""


def _watched(each: "ScheduleDescription") -> str:
    if each.expect_success_within is None:
        return ""
    late = ", which is over: it has not succeeded in time" if each.silent else ""
    return f"a success is expected within {age(each.expect_success_within)}{late}"


def _misfire(each: "ScheduleDescription") -> str:
    limit = f", at most {each.catch_up_limit}" if each.misfire == "all" else ""
    late = f", none older than {age(each.too_late_after)}" if each.too_late_after else ""
    return f"{each.misfire}{limit} (missed is what is decided more than {age(each.on_time_within)} late){late}"


def _terms(each: "ScheduleDescription") -> str:
    given = {
        "attempts": each.max_attempts,
        "backoff from": each.backoff_base and age(each.backoff_base),
        "backoff up to": each.backoff_cap and age(each.backoff_cap),
        "retry for": each.retry_for and age(each.retry_for),
        "timeout": each.timeout and age(each.timeout),
        "lease": each.lease and age(each.lease),
        "delivery": each.delivery,
        "start within": each.start_within and age(each.start_within),
    }
    return ", ".join(f"{name} {value}" for name, value in given.items() if value)


def _exact(value: timedelta) -> str:
    rest = value % timedelta(seconds=1)
    return age(value) if not rest else f"{value.total_seconds():.3f}s"
