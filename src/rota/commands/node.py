"""`rota node`: the living daemons, and those that vanished."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, Reason
from rota.commands.session import ask, using
from rota.commands.show import age, console, plural, print_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.node_reports import LivingNode, LostNode
    from rota.db.pool import Connection

app = typer.Typer(name="node", help="Look at the daemons, forget lost ones.", no_args_is_help=True)

LISTED = 200
"""Most daemons that are listed one by one."""


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List the daemons seen within the last 15 seconds, oldest first, then those that vanished within a day."""
    with using(config_file, dsn, embedded=embedded) as config:
        found, lost = ask(config, read_nodes, name="node list")
    if as_json:
        print_json([*found, *({**lost_fields(each), "state": "lost"} for each in lost)])
        return
    if not found:
        typer.echo("no daemon is alive: start one with rota run --app module:app")
    rows = node_rows(found, lost)
    if rows:
        # What fits a terminal of 80 columns; the whole id, the versions and the handlers are in --json.
        columns = ("node", "host:pid", "app…", "release…", "state", "up#", "slots~")
        console().print(table(None, *columns, rows=rows[:LISTED]))
    if len(rows) > LISTED:
        typer.echo(f"… and {plural(len(rows) - LISTED, 'more daemon')}: rota node list --json has them all")


async def read_nodes(db: "Connection") -> "tuple[list[LivingNode], list[LostNode]]":
    """Read the living daemons and the lost ones."""
    from rota.db.node_reports import list_lost_nodes, list_nodes

    return await list_nodes(db), await list_lost_nodes(db)


def lost_fields(lost: "LostNode") -> "dict[str, object]":
    """Return what JSON shows of a lost daemon."""
    from rota.commands.show import fields_of

    return {name: value for name, value in fields_of(lost).items() if name != "lost"}


def node_rows(living: "Sequence[LivingNode]", lost: "Sequence[LostNode]") -> list[tuple[object, ...]]:
    """Return a row for each daemon: node, host and pid, app, release, state, time up, slots by queue."""
    from rota.commands.status import most_first

    return [
        *(
            (
                str(each.node_id)[:8],
                f"{each.host}:{each.pid}",
                each.app,
                each.release or f"rota {each.rota_version}",
                each.displayed_state,
                age(each.up),
                " ".join(f"{queue}:{slots}" for queue, slots in most_first(each.slots)),
            )
            for each in living
        ),
        *(
            (
                str(each.node_id)[:8],
                f"{each.host}:{each.pid}",
                each.app,
                each.release or f"rota {each.rota_version}",
                f"lost {age(each.silent)} ago",
                "",
                "",
            )
            for each in lost
        ),
    ]


@app.command()
def forget(
    node: Annotated[str, typer.Argument(metavar="NODE", show_default=False, help="Its id, or how that begins.")],
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Take a daemon that vanished for good from the list of the lost. One that returns is listed again."""
    from rota.errors import RotaError

    async def forgotten(db: "Connection") -> "LivingNode | LostNode":
        from rota.db import operations

        living, lost = await read_nodes(db)
        known: list[LivingNode | LostNode] = [*living, *lost]
        matching = [each for each in known if str(each.node_id).startswith(node.lower())]
        if len(matching) != 1:
            count = "no daemon" if not matching else f"{len(matching)} daemons"
            raise RotaError(f"{count} with an id that begins with {node}: rota node list --json has the whole ids")
        await operations.forget_node(db, node_id=matching[0].node_id, reason=reason)
        return matching[0]

    with using(config_file, dsn, embedded=embedded) as config:
        gone = ask(config, forgotten, name="node forget")
    if as_json:
        print_json({"forgotten": [gone.node_id]})
        return
    typer.echo(f"node {str(gone.node_id)[:8]} on {gone.host}:{gone.pid} is forgotten")
