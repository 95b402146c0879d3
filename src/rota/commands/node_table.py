"""The table rows of daemons, for `rota node list` and `rota status`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rota.commands.printing import format_duration

if TYPE_CHECKING:
    from rota.db.node_reports import LivingNode, LostNode


def node_rows(living: Sequence["LivingNode"], lost: Sequence["LostNode"]) -> list[tuple[object, ...]]:
    """Return a table row for each daemon: node, host and pid, app, release, state, uptime, slots by queue."""
    return [
        *(
            (
                str(each.node_id)[:8],
                f"{each.host}:{each.pid}",
                each.app,
                each.release or f"rota {each.rota_version}",
                each.displayed_state,
                format_duration(each.up),
                " ".join(f"{queue}:{slots}" for queue, slots in sorted_slots(each.slots)),
            )
            for each in living
        ),
        *(
            (
                str(each.node_id)[:8],
                f"{each.host}:{each.pid}",
                each.app,
                each.release or f"rota {each.rota_version}",
                f"lost {format_duration(each.silent)} ago",
                "",
                "",
            )
            for each in lost
        ),
    ]


def sorted_slots(slots: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return a daemon's slots by queue, largest number first."""
    return sorted(slots.items(), key=lambda each: (-each[1], each[0]))


def format_slots(slots_by_queue: Mapping[str, int]) -> str:
    """Format the two largest entries. `rota node list` prints all of them."""
    slots = sorted_slots(slots_by_queue)
    more = [f"+{len(slots) - 2}"] if len(slots) > 2 else []
    return " ".join([*(f"{queue}:{count}" for queue, count in slots[:2]), *more])
