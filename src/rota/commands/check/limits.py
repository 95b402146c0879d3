"""Checks of limits."""

import asyncio
from datetime import timedelta
from difflib import get_close_matches
from shlex import quote
from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings
from rota.commands.printing import format_duration, format_instant, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.commands.check.finding import Facts
    from rota.db.limit_queries import LimitProblem, OpenWaiter

STOPPED_FOR = timedelta(days=1)
"""A limit of 0 is a finding after this time: as a pause, it is easily forgotten."""

MAX_COMPARED = 1000
"""Most limits and keys that are compared for a misspelling."""

MAX_WAIT = timedelta(seconds=10)
"""Longest pause between the two searches for jobs that could start."""


async def check_limits(facts: "Facts") -> list[Finding]:
    """Report limits of 0, limits of unknown handlers and queues, and keys with more running jobs than allowed."""
    from rota.db import limit_queries

    problems = await limit_queries.find_limit_problems(facts.db, stopped_for=STOPPED_FOR, limit=MAX_FINDINGS + 1)
    describe = {"stopped": _stopped_finding, "unknown": _unknown_finding, "over": _over_finding}
    findings = []
    for kind, finding in describe.items():
        found = [finding(each, facts) for each in problems if each.kind == kind]
        findings += cap_findings("limit", found, len(found), "rota limit list")
    return findings


def _stopped_finding(limit: "LimitProblem", _: "Facts") -> Finding:
    note = f": {limit.note}" if limit.note else ""
    return Finding(
        check="limit",
        object=f"limit {limit.key}",
        finding=f"limit {limit.key} has max_running 0 since {format_instant(limit.changed_at)}{note}; no job of it starts",
        do=f"rota limit set {quote(limit.key)} --max-running …, or rota limit remove {quote(limit.key)}",
        alert="RotaLimitsStalled",
    )


def _unknown_finding(limit: "LimitProblem", facts: "Facts") -> Finding:
    kind, _, name = limit.key.partition(":")
    known = facts.known_handlers if kind == "handler" else [queue for node in facts.nodes for queue in node.queues]
    close = get_close_matches(name, known, 1)
    meant = f"did you mean {kind}:{close[0]}? " if close else ""
    return Finding(
        check="limit",
        object=f"limit {limit.key}",
        finding=f"limit {limit.key} matches nothing: no daemon has registered the {kind} {name}",
        do=f"{meant}To remove it: rota limit remove {quote(limit.key)}",
    )


def _over_finding(limit: "LimitProblem", _: "Facts") -> Finding:
    shared = limit.key.startswith(("handler:", "queue:"))
    return Finding(
        check="limit",
        object=f"limit {limit.key}",
        finding=f"{plural(limit.running, 'job')} of {limit.key} run, and limit {limit.applies} allows {limit.max_running}",
        do="stop daemons of the previous release: they ignore limits of handlers and queues (rota node list)"
        if shared
        else f"please report this as a bug of rota, with the output of rota limit show {quote(limit.key)} --json",
    )


async def check_unmatched(facts: "Facts") -> list[Finding]:
    """Report patterns without a due or running job that resemble keys of due jobs without a limit: one is misspelt.

    Exact keys are not compared: the keys of two tenants are similar, too.
    """
    from rota.db import limit_queries

    if not (keys := await limit_queries.find_unlimited_keys(facts.db, limit=MAX_COMPARED)):
        return []
    unmatched = [
        (limit.key, close[0])
        for limit in await limit_queries.list_limits(facts.db, limit=MAX_COMPARED)
        if limit.is_limit
        and limit.key.endswith("*")
        and not (limit.running or limit.waiting or limit.more or limit.key.startswith(("handler:", "queue:")))
        and (close := _similar_keys(limit.key, keys))
    ]
    findings = [
        Finding(
            check="limit",
            object=f"limit {key}",
            finding=f"limit {key} matches no due or running job, and no limit applies to the similar key {similar}",
            do=f"correct the key in rota limit set, or in the code that enqueues; or remove it: rota limit remove {quote(key)}",
        )
        for key, similar in unmatched[:MAX_FINDINGS]
    ]
    return cap_findings("limit", findings, len(unmatched), "rota limit list")


def _similar_keys(pattern: str, keys: "Sequence[str]") -> list[str]:
    """Return the key whose beginning differs least from that of the pattern. Empty if none is similar."""
    beginning = pattern[:-1]
    lengths = (len(beginning) - 1, len(beginning) + 1, len(beginning))
    by_beginning = {key[:length]: key for length in lengths for key in keys}
    return [by_beginning[close] for close in get_close_matches(beginning, by_beginning, 1, cutoff=0.8)]


async def check_open_keys(facts: "Facts") -> list[Finding]:
    """Report due jobs that could start and do not: their key is open, and a daemon that serves them has a free slot.

    A job counts only if it is found twice, with two polls in between.
    """
    pause = min(2 * facts.config.poll_interval, MAX_WAIT)
    if not (before := await _find_startable(facts, pause)):
        return []
    await asyncio.sleep(pause.total_seconds())
    job_ids = {each.job_id for each in before}
    stuck = [each for each in await _find_startable(facts, pause) if each.job_id in job_ids]
    findings = [
        Finding(
            check="limit",
            object=f"key {each.limit_key}",
            finding=f"job {each.job_id} has been due for {format_duration(each.waited)}: its key {each.limit_key} is open and a "
            "daemon has a free slot, but no daemon has started it",
            do=f"rota why {each.job_id}; then look for errors of the dispatcher in the logs of the daemons",
            alert="RotaLimitsStalled",
        )
        for each in stuck[:MAX_FINDINGS]
    ]
    return cap_findings("limit", findings, len(stuck), "rota limit list")


async def _find_startable(facts: "Facts", older: timedelta) -> "list[OpenWaiter]":
    from rota.db import limit_queries, node_reports

    if not (waiters := await limit_queries.find_open_waiters(facts.db, older=older)):
        return []
    paused = {(each.kind, each.name) for each in await node_reports.list_paused(facts.db)}
    running = await node_reports.count_running_jobs(facts.db)
    nodes = await node_reports.list_nodes(facts.db)

    def has_free_slot(waiter: "OpenWaiter") -> bool:
        return any(
            node.claims(waiter.handler, waiter.queue)
            and node_reports.count_slots_by_handler(node, waiter.queue, running).total()
            < node.slots.get(node.slot_group(waiter.queue), 0)
            for node in nodes
        )

    return [
        each
        for each in waiters
        if not paused & {("queue", "*"), ("queue", each.queue), ("handler", each.handler)} and has_free_slot(each)
    ]
