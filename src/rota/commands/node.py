"""`rota node`: which daemons are alive."""

import json

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import ask, using
from rota.commands.show import age, console, print_json, table

app = typer.Typer(name="node", help="Look at the living daemons.", no_args_is_help=True)


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List the daemons that were seen within the last 15 seconds, oldest first."""
    from rota.db.reports import list_nodes

    with using(config_file, dsn, embedded=embedded) as config:
        found = ask(config, list_nodes, name="node list")
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no daemon is alive: start one with rota run --app module:app")
        return
    rows = [
        (
            each.node_id,
            f"{each.host}:{each.pid}",
            each.app,
            each.release,
            each.rota_version,
            each.state,
            age(each.up),
            " ".join(f"{queue}:{slots}" for queue, slots in json.loads(each.slots).items()),
            len(each.handlers),
            each.tzdata,
        )
        for each in found
    ]
    columns = ("node", "host:pid…", "app…", "release", "rota", "state", "up#", "slots…", "handlers#", "tzdata")
    console().print(table(None, *columns, rows=rows))
