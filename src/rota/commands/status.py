"""`rota status`: the whole installation on one screen."""

import asyncio
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.node import node_rows
from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import ask, asked, using
from rota.commands.show import LISTED, age, console, moment, plural, print_json, printable, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rota.config import Config
    from rota.db.node_reports import LivingNode, LostNode, Paused
    from rota.db.pool import Connection
    from rota.db.reports import DeadLetterGroup, LaneCounts
    from rota.db.schedule_reports import NextFire

EVERY_S = 2.0

LOWER_BOUNDS = (
    "there are too many jobs to count: due, retrying and future are lower bounds (≥); ages and running are exact"
)

NEXT = 5
"""How many of the next fires are shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One queue."""

    queue: str
    """Empty in the line that adds up the queues which are not listed."""
    due: int = 0
    running: int = 0
    retrying: int = 0
    future: int = 0
    dead: int = 0
    expired_leases: int = 0
    oldest_due: timedelta | None = None
    nodes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `rota status` shows."""

    queues: Sequence[QueueLine]
    nodes: "Sequence[LivingNode]"
    paused: "Sequence[Paused]"
    counted_all: bool
    """Whether due, retrying and future are exact; else they are lower bounds."""
    more_queues: int = 0
    """How many queues are not listed."""
    more: QueueLine | None = None
    """The jobs of the queues that are not listed, added up."""
    more_lanes: bool = False
    """Whether there are queues and handlers that were not even looked for."""
    lost: "Sequence[LostNode]" = ()
    """Daemons that vanished within a day, and have not been replaced or forgotten."""
    schedules: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """state -> how many"""
    next_fires: "Sequence[NextFire]" = ()


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until Ctrl-C.")] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Show queues, daemons, and what is paused."""
    if watch and as_json:
        raise typer.BadParameter("--watch is for people: leave one of the two out", param_hint="--json")
    if watch and not sys.stdout.isatty():
        raise typer.BadParameter("needs a terminal to draw on: leave it out, or use --json", param_hint="--watch")
    with using(config_file, dsn, embedded=embedded) as config:
        if watch:
            with suppress(KeyboardInterrupt):
                asyncio.run(_watch(config))
            return
        found = ask(config, read_status, name="status")
    if as_json:
        print_json(found)
        return
    console().print(render(found))


async def read_status(db: "Connection") -> Status:
    """Read everything once."""
    from rota.db import node_reports, reports, schedule_reports

    backlog = await reports.summarise_live_jobs(db)
    letters = await reports.summarise_dead_letters(db, which=reports.DeadLetterFilter())
    nodes = await node_reports.list_nodes(db)
    paused = await node_reports.list_paused(db)
    unnamed = [lane for lane in backlog.unnamed if not lane.queue]
    named = [*backlog.lanes, *(lane for lane in backlog.unnamed if lane.queue)]
    listed, more = cap_queues(by_queue(named, letters, nodes), nodes)
    return Status(
        queues=listed,
        nodes=nodes,
        lost=await node_reports.list_lost_nodes(db),
        paused=paused,
        counted_all=not backlog.at_least,
        more_queues=len(more) + backlog.more_queues,
        more=_added_up(more, unnamed),
        more_lanes=backlog.unexplored,
        schedules=await schedule_reports.summarise_schedules(db),
        next_fires=await schedule_reports.list_next_fires(db, limit=NEXT),
    )


def by_queue(
    lanes: "Sequence[LaneCounts]", letters: "Sequence[DeadLetterGroup]", nodes: "Sequence[LivingNode]"
) -> list[QueueLine]:
    """Sum up per queue; a queue that daemons serve is shown even if it is empty."""
    jobs: dict[str, LaneCounts] = {}
    for lane in lanes:
        jobs[lane.queue] = jobs[lane.queue] + lane if lane.queue in jobs else lane
    dead: dict[str, int] = {}
    for group in letters:
        dead[group.queue] = dead.get(group.queue, 0) + group.letters
    served = {queue for node in nodes for queue in node.queues if queue != "*"}
    lines = []
    for name in sorted(jobs.keys() | dead.keys() | served):
        own = jobs.get(name)
        lines.append(
            QueueLine(
                queue=name,
                due=own.due if own else 0,
                running=own.running if own else 0,
                retrying=own.retrying if own else 0,
                future=own.future if own else 0,
                dead=dead.get(name, 0),
                expired_leases=own.expired if own else 0,
                oldest_due=own.oldest_due if own else None,
                nodes=sum(node.claims_from(name) for node in nodes),
            )
        )
    return lines


def cap_queues(lines: Sequence[QueueLine], nodes: "Sequence[LivingNode]") -> tuple[list[QueueLine], list[QueueLine]]:
    """Return the lines to list and the others. Queues that daemons name come first, then those that have waited longest."""
    named = {queue for node in nodes for queue in node.queues}
    first = sorted(
        lines,
        key=lambda line: (line.queue not in named, -(line.oldest_due or timedelta(0)).total_seconds(), line.queue),
    )
    listed = {line.queue for line in first[:LISTED]}
    return [line for line in lines if line.queue in listed], first[LISTED:]


def _added_up(lines: Sequence[QueueLine], unnamed: "Sequence[LaneCounts]") -> QueueLine | None:
    """Return one line for the queues that are not listed; None where all are."""
    if not lines and not unnamed:
        return None
    parts: list[QueueLine | LaneCounts] = [*lines, *unnamed]
    ages = [each.oldest_due for each in parts if each.oldest_due is not None]
    return QueueLine(
        queue="",
        **{name: sum(getattr(each, name) for each in parts) for name in ("due", "running", "retrying", "future")},
        dead=sum(line.dead for line in lines),
        expired_leases=sum(line.expired_leases for line in lines) + sum(lane.expired for lane in unnamed),
        oldest_due=max(ages, default=None),
    )


def more_queues_line(found: Status) -> str:
    """Say how many queues are not listed and what is in them; empty where all are listed."""
    if found.more is None:
        return ""
    more, bound = found.more, "" if found.counted_all else "at least "
    count = (
        f"more than {found.more_queues:,} more queues" if found.more_lanes else plural(found.more_queues, "more queue")
    )
    return (
        f"{count}: {bound}{more.due:,} due, {more.running:,} running, {more.retrying:,} retrying, {more.future:,} future, "
        f"{more.dead:,} dead" + (f"; the oldest due for {age(more.oldest_due)}" if more.oldest_due else "")
    )


def render(found: Status) -> "RenderableType":
    """Lay it out for a screen."""
    from rich.console import Group
    from rich.text import Text

    paused_queues = {each.name for each in found.paused if each.kind == "queue"}
    queues = [
        (
            line.queue,
            count(line.due, exact=found.counted_all),
            age(line.oldest_due),
            count(line.running),
            count(line.retrying, exact=found.counted_all),
            count(line.future, exact=found.counted_all),
            count(line.dead),
            line.nodes,
            "paused" if {line.queue, "*"} & paused_queues else "nobody serves it" if not line.nodes else "",
        )
        for line in found.queues
    ]
    nodes = [(*row[:-1], _slots(node.slots)) for row, node in zip(node_rows(found.nodes, ()), found.nodes, strict=True)]
    nodes += node_rows((), found.lost)
    parts: list[Any] = [
        *_to_look_at(found),
        table(
            "queues",
            "queue…",
            "due#",
            "oldest#",
            "running#",
            "retrying#",
            "future#",
            "dead#",
            "nodes#",
            "",
            rows=queues,
        )
        if queues
        else Text("no jobs, and no queue that anybody serves"),
        *([Text(f"… and {printable(more_queues_line(found))}")] if found.more else []),
        "",
        table("nodes", "node", "host:pid…", "app…", "release", "state", "up#", "slots~", rows=nodes[:LISTED])
        if nodes
        else Text("no daemon is alive: start one with rota run --app module:app", style="yellow"),
    ]
    if found.schedules:
        parts += ["", *_schedules(found)]
    return Group(*parts)


def _to_look_at(found: Status) -> "list[RenderableType]":
    """What stands at the top, for a screen may be short: warnings, and what is paused."""
    from rich.text import Text

    parts: list[RenderableType] = []
    expired = sum(line.expired_leases for line in (*found.queues, *([found.more] if found.more else [])))
    if found.lost:
        lost = plural(found.lost[0].lost, "daemon")
        parts.append(Text(f"{lost} vanished within a day: rota node list, rota check", style="yellow"))
    if expired:
        parts.append(
            Text(f"{plural(expired, 'expired lease')}: reaped within seconds where a daemon is alive", style="yellow")
        )
    bad = [state for state in ("invalid", "overdue") if found.schedules.get(state)]
    if found.schedules.get("silent"):
        bad.append("silent (no success in time)")
    if bad:
        parts.append(Text(f"schedules {', '.join(bad)}: rota schedule list --state …, or rota check", style="yellow"))
    if not found.counted_all:
        parts.append(Text(LOWER_BOUNDS, style="yellow"))
    if found.paused:
        rows = [(each.kind, each.name, each.paused_by, moment(each.paused_at), each.reason) for each in found.paused]
        parts.append(table("paused", "what", "name…", "by…", "since", "why…", rows=rows))
    return [*parts, ""] if parts else []


def _schedules(found: Status) -> "list[RenderableType]":
    from rich.text import Text

    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(found.schedules.items()) if state != "silent")
    parts: list[RenderableType] = []
    if found.next_fires:
        rows = [
            (
                each.name,
                each.handler,
                moment(each.next_fire_at),
                "due now" if each.next_fire_at <= each.now else f"in {age(each.next_fire_at - each.now)}",
                f"+ up to {age(each.jitter)}" if each.jitter else "",
            )
            for each in found.next_fires
        ]
        parts.append(table(f"schedules ({counts}), next", "schedule…", "handler…", "fires", "#", "jitter", rows=rows))
    else:
        parts.append(Text(f"schedules: {counts}; none of them has a next instant by now"))
    return parts


def count(number: int, *, exact: bool = True) -> str:
    """Write a number of jobs; a lower bound gets a `≥`."""
    return f"{'' if exact else '≥'}{number:,}" if number else "·"


def most_first(slots: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return a daemon's slots by queue, the most first."""
    return sorted(slots.items(), key=lambda each: (-each[1], each[0]))


def _slots(given: Mapping[str, int]) -> str:
    """Write the largest two: `rota node list` has them all."""
    slots = most_first(given)
    more = [f"+{len(slots) - 2}"] if len(slots) > 2 else []
    return " ".join([*(f"{queue}:{count}" for queue, count in slots[:2]), *more])


async def _watch(config: "Config") -> None:
    """Look until Ctrl-C, which cancels us. A cancellation may be lost in the driver, or come back as a lost connection."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from rota.errors import DatabaseUnusable
    from rota.supervision.loop import is_cancel_pending

    found = await asked(config, read_status, name="status")
    with Live(render(found), console=console(), screen=True) as live:
        while not is_cancel_pending():
            await asyncio.sleep(EVERY_S)
            try:
                found = await asked(config, read_status, name="status")
                shown = render(found)
            except DatabaseUnusable as error:  # it is in an outage that one watches
                shown = Group(Text(printable(error), style="red"), "", "before that:", "", render(found))
            live.update(shown, refresh=True)
