"""Sum jobs and dead letters by queue, for `rota status` and `rota queue list`."""

import dataclasses
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.printing import MAX_LISTED, AdaptiveTable, format_duration, table

if TYPE_CHECKING:
    from rota.db.node_reports import LivingNode
    from rota.db.reports import DeadLetterGroup, LaneCounts


_COLUMNS = (
    "queue~",
    "due#",
    "oldest#",
    "limited#",
    "running#",
    "retrying#",
    "future#",
    "dead#",
    "nodes#",
    "",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """The number of jobs in a queue, by state."""

    queue: str
    """Empty in the line that sums up the unlisted queues."""
    due: int = 0
    running: int = 0
    retrying: int = 0
    future: int = 0
    dead: int = 0
    expired_leases: int = 0
    oldest_due: timedelta | None = None
    nodes: int = 0
    limited: int = 0
    """Due jobs that a limit or hold applies to."""


def sum_by_queue(
    lanes: "Sequence[LaneCounts]", letters: "Sequence[DeadLetterGroup]", nodes: "Sequence[LivingNode]"
) -> list[QueueLine]:
    """Return one line for each queue that has jobs or dead letters, or is served by a daemon."""
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
                limited=own.limited if own else 0,
            )
        )
    return lines


def split_listed(lines: Sequence[QueueLine], nodes: "Sequence[LivingNode]") -> tuple[list[QueueLine], list[QueueLine]]:
    """Return the lines to list and the others. Queues named by daemons have priority, then those with the oldest due job."""
    named = {queue for node in nodes for queue in node.queues}
    by_priority = sorted(
        lines,
        key=lambda line: (line.queue not in named, -(line.oldest_due or timedelta(0)).total_seconds(), line.queue),
    )
    listed = {line.queue for line in by_priority[:MAX_LISTED]}
    return [line for line in lines if line.queue in listed], by_priority[MAX_LISTED:]


def sum_unlisted(lines: Sequence[QueueLine], unnamed: "Sequence[LaneCounts]") -> QueueLine | None:
    """Return one line for the unlisted queues, None if all are listed."""
    if not lines and not unnamed:
        return None
    parts: list[QueueLine | LaneCounts] = [*lines, *unnamed]
    ages = [each.oldest_due for each in parts if each.oldest_due is not None]
    return QueueLine(
        queue="",
        **{
            name: sum(getattr(each, name) for each in parts)
            for name in ("due", "limited", "running", "retrying", "future")
        },
        dead=sum(line.dead for line in lines),
        expired_leases=sum(line.expired_leases for line in lines) + sum(lane.expired for lane in unnamed),
        oldest_due=max(ages, default=None),
    )


def queue_table(
    title: str | None, lines: Sequence[QueueLine], paused: Collection[str], *, exact: bool
) -> AdaptiveTable:
    """Return the table of queues. It has a column for limited jobs only if there are some, to fit 80 characters otherwise."""
    has_limited = any(line.limited for line in lines)
    rows = []
    for line in lines:
        state = "paused" if {line.queue, "*"} & set(paused) else "" if line.nodes else "no daemon serves it"
        row = [
            line.queue,
            _format_count(line.due, exact=exact),
            format_duration(line.oldest_due),
            _format_count(line.limited, exact=exact),
            _format_count(line.running),
            _format_count(line.retrying, exact=exact),
            _format_count(line.future, exact=exact),
            _format_count(line.dead),
            line.nodes,
            state,
        ]
        rows.append([cell for column, cell in zip(_COLUMNS, row, strict=True) if has_limited or column != "limited#"])
    columns = [column for column in _COLUMNS if has_limited or column != "limited#"]
    return table(title, *columns, rows=rows)


def _format_count(number: int, *, exact: bool = True) -> str:
    """Format a number of jobs. A lower bound gets a `≥`."""
    return f"{'' if exact else '≥'}{number:,}" if number else "·"
