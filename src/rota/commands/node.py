"""`rota node`: list living and lost daemons, and remove lost ones from the list."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, takes_database
from rota.commands.node_table import node_rows
from rota.commands.options import AsJson, Note, argument
from rota.commands.printing import console, fields_of, plural, print_json, table

if TYPE_CHECKING:
    from rota.db.node_reports import LivingNode, LostNode
    from rota.db.pool import Connection

app = typer.Typer(name="node", help="List daemons, and forget lost ones.", no_args_is_help=True)

MAX_LISTED = 200
"""Maximum number of daemons in the table."""


@app.command("list")
@takes_database
def list_(database: Database, as_json: AsJson = False) -> None:
    """List living daemons, oldest first, then lost daemons.

    A daemon is alive if it was seen within the last 15 seconds. A lost daemon is listed for a day.
    """
    living, lost = database.run(read_nodes, name="node list")
    if as_json:
        print_json([*living, *({**_lost_fields(each), "state": "lost"} for each in lost)])
        return
    if not living:
        typer.echo("no daemon is alive. Start one: rota run --app module:app")
    rows = node_rows(living, lost)
    if rows:
        # Only the columns that fit 80 characters: full ids, versions and handlers are in --json.
        columns = ("node", "host:pid", "app…", "release…", "state", "up#", "slots~")
        console().print(table(None, *columns, rows=rows[:MAX_LISTED]))
    if len(rows) > MAX_LISTED:
        typer.echo(f"… and {plural(len(rows) - MAX_LISTED, 'more daemon')}. To list all of them: rota node list --json")


async def read_nodes(db: "Connection") -> "tuple[list[LivingNode], list[LostNode]]":
    """Read the living daemons and the lost ones."""
    from rota.db.node_reports import list_lost_nodes, list_nodes

    return await list_nodes(db), await list_lost_nodes(db)


def _lost_fields(lost: "LostNode") -> "dict[str, object]":
    """Return the fields of a lost daemon for JSON."""
    return {name: value for name, value in fields_of(lost).items() if name != "lost"}


@app.command()
@takes_database
def forget(
    database: Database,
    node: Annotated[str, argument("NODE", "Id of the daemon, or the beginning of it.")],
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Remove a lost daemon from the list.

    If the daemon returns, it is listed again.
    """
    from rota.errors import RotaError

    async def work(db: "Connection") -> "LivingNode | LostNode":
        from rota.db import operations

        living, lost = await read_nodes(db)
        nodes: list[LivingNode | LostNode] = [*living, *lost]
        matching = [each for each in nodes if str(each.node_id).startswith(node.lower())]
        if len(matching) != 1:
            count = "no daemon" if not matching else f"{len(matching)} daemons"
            raise RotaError(f"{count} with an id that begins with {node}. To see full ids: rota node list --json")
        await operations.forget_node(db, node_id=matching[0].node_id, reason=note)
        return matching[0]

    forgotten = database.run(work, name="node forget")
    if as_json:
        print_json({"forgotten": [forgotten.node_id]})
        return
    typer.echo(f"node {str(forgotten.node_id)[:8]} on {forgotten.host}:{forgotten.pid} is no longer listed as lost")
