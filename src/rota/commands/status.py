"""`rota status`: queues, daemons and schedules on one screen."""

import asyncio
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.database import Database, run_on_connection, takes_database
from rota.commands.node_table import format_slots, node_rows
from rota.commands.options import AsJson
from rota.commands.printing import (
    MAX_LISTED,
    console,
    format_duration,
    format_instant,
    plural,
    print_json,
    printable,
    table,
)
from rota.commands.queue_lines import QueueLine, queue_table, split_listed, sum_by_queue, sum_unlisted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rota.config import Config
    from rota.db.node_reports import LivingNode, LostNode, Paused
    from rota.db.pool import Connection
    from rota.db.schedule_reports import NextFire

REFRESH_SECONDS = 2.0

LOWER_BOUNDS = (
    "too many jobs to count: due, limited, retrying and future are lower bounds (≥); running and ages are exact"
)

MAX_NEXT_FIRES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The data of `rota status`."""

    queues: Sequence[QueueLine]
    nodes: "Sequence[LivingNode]"
    paused: "Sequence[Paused]"
    counted_all: bool
    """Whether due, retrying and future are exact, not lower bounds."""
    more_queues: int = 0
    """Number of unlisted queues."""
    more: QueueLine | None = None
    """Sum of the unlisted queues."""
    more_lanes: bool = False
    """Whether the query stopped before it had found every queue and handler."""
    lost: "Sequence[LostNode]" = ()
    """Daemons lost within a day that were not replaced or forgotten."""
    schedules: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """state -> number of schedules"""
    next_fires: "Sequence[NextFire]" = ()


@takes_database
def status(
    database: Database,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show queues, daemons, schedules and pauses."""
    if watch and as_json:
        raise typer.BadParameter("can't be combined with --watch", param_hint="--json")
    if watch and not sys.stdout.isatty():
        raise typer.BadParameter("needs a terminal. Leave it out, or use --json", param_hint="--watch")
    if watch:
        with database.configured() as config, suppress(KeyboardInterrupt):
            asyncio.run(_watch(config))
        return
    current = database.run(read_status, name="status")
    if as_json:
        print_json(current)
        return
    console().print(render(current))


async def read_status(db: "Connection") -> Status:
    """Query everything that `rota status` shows."""
    from rota.db import node_reports, reports, schedule_reports

    backlog = await reports.summarise_live_jobs(db)
    letters = await reports.summarise_dead_letters(db, which=reports.DeadLetterFilter())
    nodes = await node_reports.list_nodes(db)
    paused = await node_reports.list_paused(db)
    unnamed = [lane for lane in backlog.unnamed if not lane.queue]
    named = [*backlog.lanes, *(lane for lane in backlog.unnamed if lane.queue)]
    listed, unlisted = split_listed(sum_by_queue(named, letters, nodes), nodes)
    return Status(
        queues=listed,
        nodes=nodes,
        lost=await node_reports.list_lost_nodes(db),
        paused=paused,
        counted_all=not backlog.at_least,
        more_queues=len(unlisted) + backlog.more_queues,
        more=sum_unlisted(unlisted, unnamed),
        more_lanes=backlog.unexplored,
        schedules=await schedule_reports.summarise_schedules(db),
        next_fires=await schedule_reports.list_next_fires(db, limit=MAX_NEXT_FIRES),
    )


def more_queues_text(status: Status) -> str:
    """Describe the unlisted queues and their jobs. Empty if all are listed."""
    if status.more is None:
        return ""
    more, bound = status.more, "" if status.counted_all else "at least "
    count = (
        f"more than {status.more_queues:,} more queues"
        if status.more_lanes
        else plural(status.more_queues, "more queue")
    )
    return (
        f"{count}: {bound}{more.due:,} due, {more.limited:,} limited, {more.running:,} running, {more.retrying:,} retrying, "
        f"{more.future:,} future, {more.dead:,} dead"
        + (f"; the oldest due for {format_duration(more.oldest_due)}" if more.oldest_due else "")
    )


def render(status: Status) -> "RenderableType":
    """Return the screen for rich."""
    from rich.console import Group
    from rich.text import Text

    paused_queues = {each.name for each in status.paused if each.kind == "queue"}
    nodes = [
        (*row[:-1], format_slots(node.slots))
        for row, node in zip(node_rows(status.nodes, ()), status.nodes, strict=True)
    ]
    nodes += node_rows((), status.lost)
    parts: list[Any] = [
        *_render_warnings(status),
        queue_table("queues", status.queues, paused_queues, exact=status.counted_all)
        if status.queues
        else Text("no jobs, and no daemon serves a queue"),
        *([Text(f"… and {printable(more_queues_text(status))}")] if status.more else []),
        "",
        table("nodes", "node", "host:pid…", "app…", "release", "state", "up#", "slots~", rows=nodes[:MAX_LISTED])
        if nodes
        else Text("no daemon is alive. Start one: rota run --app module:app", style="yellow"),
    ]
    if status.schedules:
        parts += ["", *_render_schedules(status)]
    return Group(*parts)


def _render_warnings(status: Status) -> "list[RenderableType]":
    """Return warnings and pauses, for the top of the screen."""
    from rich.text import Text

    parts: list[RenderableType] = []
    expired = sum(line.expired_leases for line in (*status.queues, *([status.more] if status.more else [])))
    if status.lost:
        lost = plural(status.lost[0].lost, "daemon")
        parts.append(Text(f"{lost} lost within a day. See rota node list and rota check", style="yellow"))
    if expired:
        parts.append(
            Text(f"{plural(expired, 'expired lease')}; a living daemon reaps them within seconds", style="yellow")
        )
    bad_states = [state for state in ("invalid", "overdue") if status.schedules.get(state)]
    if status.schedules.get("silent"):
        bad_states.append("silent (no success in time)")
    if bad_states:
        parts.append(
            Text(
                f"some schedules are {', '.join(bad_states)}: rota schedule list --state …, rota check",
                style="yellow",
            )
        )
    if not status.counted_all:
        parts.append(Text(LOWER_BOUNDS, style="yellow"))
    if status.paused:
        rows = [
            (each.kind, each.name, each.paused_by, format_instant(each.paused_at), each.reason)
            for each in status.paused
        ]
        parts.append(table("paused", "what", "name…", "by…", "since", "why…", rows=rows))
    return [*parts, ""] if parts else []


def _render_schedules(status: Status) -> "list[RenderableType]":
    from rich.text import Text

    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(status.schedules.items()) if state != "silent")
    parts: list[RenderableType] = []
    if status.next_fires:
        rows = [
            (
                each.name,
                each.handler,
                format_instant(each.next_fire_at),
                "due now" if each.next_fire_at <= each.now else f"in {format_duration(each.next_fire_at - each.now)}",
                f"+ up to {format_duration(each.jitter)}" if each.jitter else "",
            )
            for each in status.next_fires
        ]
        parts.append(table(f"schedules ({counts}), next", "schedule…", "handler…", "fires", "#", "jitter", rows=rows))
    else:
        parts.append(Text(f"schedules: {counts}; none of them has a next instant"))
    return parts


async def _watch(config: "Config") -> None:
    """Refresh the screen until Ctrl-C cancels this task.

    The loop checks is_cancel_pending() because the driver may swallow a cancellation or raise it as a lost connection.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from rota.errors import DatabaseUnusable
    from rota.supervision.loop import is_cancel_pending

    current = await run_on_connection(config, read_status, name="status")
    with Live(render(current), console=console(), screen=True) as live:
        while not is_cancel_pending():
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                current = await run_on_connection(config, read_status, name="status")
                screen = render(current)
            except DatabaseUnusable as error:  # keep watching during an outage
                screen = Group(Text(printable(error), style="red"), "", "last known state:", "", render(current))
            live.update(screen, refresh=True)
