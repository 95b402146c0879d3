"""Checks of the daemons."""

from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings
from rota.commands.printing import format_duration, plural

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts
    from rota.db.node_reports import LivingNode


REFUSED_CURE = (
    "correct the row's values, or the trigger, foreign key or constraint that refuses it; the log of the daemon names the error as "
    "row.refused"
)

IGNORED_CURE = (
    "drop or correct the trigger on rota.jobs that drops the change without an error: psql's \\d rota.jobs lists the triggers, and "
    "one that runs BEFORE and returns NULL has this effect"
)


async def check_zone_data(facts: "Facts") -> list[Finding]:
    """Report daemons with different time zone data. They compute different fires for zones that have changed."""
    releases: dict[str, list[str]] = {}
    for node in facts.nodes:
        releases.setdefault(node.tzdata or "unknown", []).append(f"{node.host}:{node.pid}")
    if len(releases) < 2:
        return []
    shown = "; ".join(f"{release} on {', '.join(where[:3])}" for release, where in sorted(releases.items()))
    return [
        Finding(
            check="tzdata",
            object="daemons",
            finding=f"daemons have different time zone data: {shown}",
            do="install the same tzdata everywhere: for zones that have changed, these daemons compute different fires",
            alert="RotaReleasesMixed",
        )
    ]


async def check_foreign_handlers(facts: "Facts") -> list[Finding]:
    """Report handlers that several apps register: the apps' daemons claim each other's jobs."""
    from rota.db.node_reports import is_built_in

    apps: dict[str, dict[str, LivingNode]] = {}
    for node in facts.nodes:
        for handler in node.handlers:
            if node.app is not None and not is_built_in(handler) and handler not in facts.config.handlers.shared:
                apps.setdefault(handler, {}).setdefault(node.app, node)
    several = sorted(handler for handler, nodes in apps.items() if len(nodes) > 1)
    findings = [
        Finding(
            check="foreign handlers",
            object=handler,
            finding=f"the handler {handler} is registered by different apps, which claim each other's jobs: "
            + ", ".join(
                f"{name}{f' (release {node.release})' if node.release else ''} on {node.host}:{node.pid}"
                for name, node in sorted(apps[handler].items())
            ),
            do=f'rename it in one of them, or allow it in the rota.toml of each: [handlers] shared = ["{handler}"]',
        )
        for handler in several[:MAX_FINDINGS]
    ]
    return cap_findings(
        "foreign handlers", findings, len(several), "rota node list --json shows the handlers of each daemon"
    )


async def check_refused_rows(facts: "Facts") -> list[Finding]:
    """Report jobs and schedules on which the database refuses the daemons' operations, so that they make no progress."""
    from rota.db import server_reports

    rows = await server_reports.list_refused_rows(facts.db)
    findings = [
        Finding(
            check="refused rows",
            object=f"{each.what} {each.id}",
            finding=f"the database refuses the daemons' {each.doing} of {each.what} {each.id}, for {format_duration(each.age)}: "
            f"{each.kind} on {each.node}",
            do=IGNORED_CURE if each.kind == "ChangeIgnored" else REFUSED_CURE,
            alert="RotaLagging" if each.doing == "claim" else None,
        )
        for each in rows[:MAX_FINDINGS]
    ]
    return cap_findings("refused rows", findings, len(rows), "the logs of the daemons name each as row.refused")


async def check_lost(facts: "Facts") -> list[Finding]:
    """Report daemons lost within a day that were not replaced or forgotten."""
    from rota.db import node_reports

    lost = await node_reports.list_lost_nodes(facts.db, limit=MAX_FINDINGS)
    findings = [
        Finding(
            check="lost nodes",
            object=f"{each.host}:{each.pid}",
            finding=f"the daemon of {each.app} on {each.host}:{each.pid} (node {str(each.node_id)[:8]}) was lost "
            f"{format_duration(each.silent)} ago: it stopped without a shutdown",
            do="see its log and its exit code, and start it again on that host. If it will not return: "
            f"rota node forget {str(each.node_id)[:8]}",
            alert="RotaNodeLost",
        )
        for each in lost
    ]
    return cap_findings("lost nodes", findings, lost[0].lost if lost else 0, "rota node list")


async def check_absence(facts: "Facts") -> list[Finding]:
    """Report that no daemon is alive while jobs or schedules wait. If something is already late, other checks report it."""
    lanes = (*facts.backlog.lanes, *facts.backlog.unnamed)
    if facts.nodes or any(lane.due or lane.limited or lane.expired for lane in lanes) or facts.schedules.get("overdue"):
        return []
    jobs, fires = sum(lane.future + lane.retrying for lane in lanes), facts.schedules.get("ok", 0)
    if not jobs and not fires:
        return []
    return [
        Finding(
            check="daemons",
            object="daemons",
            finding=f"no daemon is alive, and {plural(jobs, 'job')} and {plural(fires, 'schedule')} wait for their time",
            do="start one before they are due: rota run --app module:app",
            alert="RotaGone",
        )
    ]
