"""Checks of schedules."""

from shlex import quote
from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings
from rota.commands.printing import format_duration, format_instant, plural

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts
    from rota.db.schedule_reports import ListedSchedule

CLOCK_MISSING = "its row in rota.schedule_clocks is missing"
"""The reason that the view rota.schedules gives."""


async def check_states(facts: "Facts") -> list[Finding]:
    """Report schedules that are invalid, overdue, or without a success in time."""
    from rota.db import schedule_reports

    all_findings = []
    for state in ("invalid", "overdue", "silent"):
        if count := facts.schedules.get(state):
            schedules = await schedule_reports.list_schedules(
                facts.db, which=schedule_reports.ScheduleFilter(), state=state, limit=MAX_FINDINGS
            )
            findings = [await _finding(facts, state, each) for each in schedules]
            all_findings += cap_findings(f"{state} schedules", findings, count, f"rota schedule list --state {state}")
    return all_findings


async def check_ahead(facts: "Facts") -> list[Finding]:
    """Report schedules that decided about future instants while the server's clock was ahead."""
    from rota.db import schedule_reports

    return [
        Finding(
            check="schedules ahead",
            object=name,
            finding=f"{name} has decided about all instants up to {format_instant(upto)}: the server's clock was ahead",
            do="it does not fire before that time. To fire earlier: rota schedule remove, then add it again",
        )
        for name, upto in await schedule_reports.find_schedules_ahead(facts.db, limit=MAX_FINDINGS)
    ]


async def check_crowds(facts: "Facts") -> list[Finding]:
    """Report instants that too many schedules without jitter share."""
    from rota.commands.schedule_details import JITTER_ADVICE
    from rota.db import schedule_reports

    return [
        Finding(
            check="crowd",
            object=crowd.sample,
            finding=f"{plural(crowd.schedules, 'schedule')} without jitter, including {crowd.sample}, fire at the same time"
            + (f" at {format_instant(crowd.next_fire_at)}" if crowd.next_fire_at else f" ({crowd.cron})"),
            do=JITTER_ADVICE,
        )
        for crowd in await schedule_reports.find_crowds(facts.db)
    ]


async def _finding(facts: "Facts", state: str, each: "ListedSchedule") -> Finding:
    from rota.db.blockers import find_row_locker

    if state == "invalid":
        return _invalid_finding(each)
    if state == "silent":
        return _silent_finding(each)
    return _overdue_finding(each, await find_row_locker(facts.db, schedule_id=each.schedule_id))


def _invalid_finding(each: "ListedSchedule") -> Finding:
    return Finding(
        check="invalid schedules",
        object=each.name,
        finding=f"{each.name} does not fire: {each.invalid_reason}",
        do="as the owner of the schema: insert into rota.schedule_clocks (schedule_id, next_fire_at)"  # noqa: S608  for people
        f" values ({each.schedule_id}, '-infinity')"
        if each.invalid_reason == CLOCK_MISSING
        else f"rota schedule set {quote(each.name)} --cron … or --timezone …",
        alert="RotaSchedulesInvalid",
    )


def _overdue_finding(each: "ListedSchedule", locked_by: str | None) -> Finding:
    since = f"since {format_instant(each.next_fire_at)}" if each.next_fire_at else "and was never planned"
    why = f"{locked_by} locks its row in an open transaction" if locked_by else "no daemon decides about it"
    return Finding(
        check="overdue schedules",
        object=each.name,
        finding=f"{each.name} is due {since}, and {why}",
        do="commit or roll back that transaction, or end the session with pg_terminate_backend"
        if locked_by
        else "start a daemon of any app: rota run --app module:app; if one is alive, see its log",
        alert="RotaSchedulesOverdue",
    )


def _silent_finding(each: "ListedSchedule") -> Finding:
    last = f"its last was {format_instant(each.last_success_at)}" if each.last_success_at else "there was none yet"
    return Finding(
        check="no success",
        object=each.name,
        finding=f"{each.name} has not succeeded within {format_duration(each.expect_success_within)}: {last}",
        do=f"rota why {quote(each.name)}, or rota schedule show {quote(each.name)}",
    )
