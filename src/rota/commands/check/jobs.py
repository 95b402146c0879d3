"""Checks of queues, live jobs and dead letters."""

from collections import Counter
from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings
from rota.commands.printing import format_duration, format_instant, plural

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts
    from rota.db.node_reports import Paused
    from rota.db.reports import DeadLetterGroup, LaneCounts

LONG_DUE = timedelta(seconds=60)
"""Full queues are a finding only if a job has been due for longer than this."""


async def check_paused(facts: "Facts") -> list[Finding]:
    """Report paused queues and handlers, because pauses are easily forgotten."""
    from rota.db import node_reports

    paused = await node_reports.list_paused(facts.db)
    return cap_findings(
        "paused", [_paused_finding(each) for each in paused[:MAX_FINDINGS]], len(paused), "rota status lists them"
    )


def _paused_finding(each: "Paused") -> Finding:
    everything = each.kind == "queue" and each.name == "*"
    what = "every queue" if everything else f"the {each.kind} {each.name}"
    since = f" since {format_instant(each.paused_at)}" if each.paused_at else ""
    by = f" by {each.paused_by}" if each.paused_by else ""
    return Finding(
        check="paused",
        object=what,
        finding=f"{what} is paused{since}{by}: {each.reason or 'no reason given'}",
        do=f"rota {each.kind} resume {'--all' if everything else quote(each.name)}, once the reason is gone",
        alert="RotaPausedForLong",
    )


async def check_unclaimed(facts: "Facts") -> list[Finding]:
    """Report pairs of queue and handler with due jobs that no living daemon would claim."""
    from rota.db.node_reports import why_unclaimed

    backlog, bound = facts.backlog, "at least " if facts.backlog.at_least else ""
    unclaimed = [
        (lane, why)
        for lane in sorted(
            backlog.by_handler, key=lambda lane: (not lane.registered, -(lane.oldest_due or timedelta(0)))
        )
        if (lane.due or lane.limited)
        and (why := why_unclaimed(lane.handler, lane.queue, facts.nodes, facts.known_handlers))
    ]
    findings = [
        Finding(
            check="unclaimed",
            object=f"handler {lane.handler} in queue {lane.queue}",
            finding=f"{bound}{plural(lane.due + lane.limited, 'due job')} of {lane.handler} in queue {lane.queue}"
            + (f", the oldest for {format_duration(lane.oldest_due)}" if lane.oldest_due else ""),
            do=why,
            alert="RotaUnclaimable",
        )
        for lane, why in unclaimed[:MAX_FINDINGS]
    ]
    return cap_findings("unclaimed", findings, len(unclaimed), "rota queue list shows where they are")


async def check_priorities(facts: "Facts") -> list[Finding]:
    """Report jobs with an invalid priority, which no claim searches. Only the table's owner can store one."""
    invalid = [lane for lane in facts.backlog.lanes if lane.priority not in range(10) and lane.due + lane.limited]
    findings = [
        Finding(
            check="priority",
            object=f"handler {lane.handler} in queue {lane.queue}",
            finding=f"{plural(lane.due + lane.limited, 'due job')} of {lane.handler} in queue {lane.queue} have the priority "
            f"{lane.priority}, which is not in 0 to 9: no daemon claims them",
            do=f"as the schema's owner, set priority = 9 on the rows of rota.jobs where priority = {lane.priority}",
        )
        for lane in invalid[:MAX_FINDINGS]
    ]
    return cap_findings("priority", findings, len(invalid), "rota job list shows priorities")


async def check_slots(facts: "Facts") -> list[Finding]:
    """Report queues without a free slot on any daemon that serves them, if a job has been due for longer than LONG_DUE."""
    from rota.db import node_reports

    late = [lane for lane in facts.backlog.by_handler if lane.oldest_due is not None and lane.oldest_due > LONG_DUE]
    if not late:
        return []
    paused = {(each.kind, each.name) for each in await node_reports.list_paused(facts.db)}
    running = await node_reports.count_running_jobs(facts.db)
    full: dict[str, tuple[LaneCounts, int, Counter[str]]] = {}
    for lane in late:
        serving = [node for node in facts.nodes if node.claims(lane.handler, lane.queue)]
        if not serving or paused & {("queue", "*"), ("queue", lane.queue), ("handler", lane.handler)}:
            continue
        slots = [node.slots.get(node.slot_group(lane.queue), 0) for node in serving]
        taken = [node_reports.count_slots_by_handler(node, lane.queue, running) for node in serving]
        if all(by_handler.total() >= total for by_handler, total in zip(taken, slots, strict=True)):
            earlier = full.get(lane.queue)
            full[lane.queue] = (earlier[0] + lane if earlier else lane, sum(slots), sum(taken, Counter()))
    ordered = sorted(full.values(), key=lambda each: each[0].oldest_due or LONG_DUE, reverse=True)
    bound = "at least " if facts.backlog.at_least else ""
    findings = [_full_queue_finding(lane, slots, taken_by, bound) for lane, slots, taken_by in ordered[:MAX_FINDINGS]]
    return cap_findings("slots", findings, len(full), "rota queue list shows where jobs wait")


def _full_queue_finding(lane: "LaneCounts", slots: int, taken_by: "Counter[str]", bound: str) -> Finding:
    largest = ", ".join(f"{count} by {handler}" for handler, count in taken_by.most_common(3))
    return Finding(
        check="slots",
        object=f"queue {lane.queue}",
        finding=f"all {plural(slots, 'slot')} of the queue {lane.queue} are taken ({largest}), and "
        f"{bound}{plural(lane.due, 'due job')} wait, the oldest for {format_duration(lane.oldest_due)}",
        do="start more daemons, give the queue more slots (ROTA_QUEUES), or enqueue less. To see the running jobs: "
        f"rota job list --state running --handler {quote(taken_by.most_common(1)[0][0])}",
        alert="RotaLagging",
    )


async def check_lanes(facts: "Facts") -> list[Finding]:
    """Report that there are too many pairs of queue and handler to check all of them."""
    from rota.db.reports import MAX_NAMED_LANES

    more = facts.backlog.more_lanes
    if not more:
        return []
    count = f"more than {MAX_NAMED_LANES + more:,}" if facts.backlog.unexplored else f"{MAX_NAMED_LANES + more:,}"
    return [
        Finding(
            check="lanes",
            object="queues and handlers",
            finding=f"jobs wait in {count} pairs of queue and handler, most of which no daemon has registered",
            do="a client probably generates names: see created_by in rota job list, and rota job cancel --handler or --queue",
            alert="RotaUnclaimable",
        )
    ]


async def check_leases(facts: "Facts") -> list[Finding]:
    """Report expired leases that no daemon has reaped."""
    expired = sum(lane.expired for lane in (*facts.backlog.lanes, *facts.backlog.unnamed))
    if not expired:
        return []
    return [
        Finding(
            check="leases",
            object=plural(expired, "job"),
            finding=f"{plural(expired, 'lease')} expired and not yet reaped",
            do="run rota check again in some seconds; if the finding stays, see the daemons' logs, or start another daemon"
            if facts.nodes
            else "no daemon is alive to reap them: start one with rota run --app module:app",
            alert="RotaLeasesNotReaped",
        )
    ]


async def check_dead_letters(facts: "Facts") -> list[Finding]:
    """Report dead letters, by handler, queue, reason and type of error."""
    from rota.db import reports

    groups = await reports.summarise_dead_letters(facts.db, which=reports.DeadLetterFilter(), limit=MAX_FINDINGS)
    return cap_findings(
        "dead letters",
        [_dead_letters_finding(group) for group in groups],
        groups[0].total if groups else 0,
        "rota dead summary",
    )


def _dead_letters_finding(group: "DeadLetterGroup") -> Finding:
    what = f"{plural(group.letters, 'dead letter')} of {group.handler} in queue {group.queue}: {group.reason}"
    filters = f"--handler {quote(group.handler)} --queue {quote(group.queue)} --reason {group.reason}"
    if group.error_kind:
        filters += f" --error-kind {quote(group.error_kind)}"
        what += f", {group.error_kind}"
    return Finding(
        check="dead letters",
        object=f"handler {group.handler} in queue {group.queue}",
        finding=f"{what}; the latest is job {group.sample}",
        do=f"rota dead list {filters}, then rota dead redrive or discard with the same filters",
        alert="RotaDeadLetters",
    )
