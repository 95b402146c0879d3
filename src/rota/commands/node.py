"""`rota node`: which daemons are alive."""

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import ask, using
from rota.commands.show import age, console, print_json, table

app = typer.Typer(name="node", help="Look at the living daemons.", no_args_is_help=True)


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List the daemons that were seen within the last 15 seconds, oldest first."""
    from rota.commands.status import most_first
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
            str(each.node_id)[:8],
            f"{each.host}:{each.pid}",
            each.app,
            each.release or f"rota {each.rota_version}",
            each.standing,
            age(each.up),
            " ".join(f"{queue}:{slots}" for queue, slots in most_first(each.slots)),
        )
        for each in found
    ]
    # What fits a terminal of 80 columns; the whole id, the versions and the handlers are in --json.
    columns = ("node", "host:pid", "app…", "release…", "state", "up#", "slots~")
    console().print(table(None, *columns, rows=rows))
