"""`rota handler`: what can be called, who can call it, and stopping it."""

from typing import Annotated

import typer

from rota.commands import pausing
from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, Reason
from rota.commands.session import ask, using
from rota.commands.show import age, console, print_json, relative, table

app = typer.Typer(name="handler", help="Look at handlers, pause them, let them go on.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="HANDLER", show_default=False, help="Which.")]


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List the handlers that daemons have registered, how many living daemons have them, and which are paused and why."""
    from datetime import UTC, datetime

    from rota.db.reports import list_handlers

    with using(config_file, dsn, embedded=embedded) as config:
        found = ask(config, list_handlers, name="handler list")
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC)
    rows = [
        (
            each.handler,
            each.app,
            each.release,
            each.queue or "default",
            each.max_attempts or 20,
            age(each.timeout),
            each.delivery or "at_least_once",
            each.nodes,
            "paused" if each.paused else "" if each.nodes else "no living daemon has it",
            f"{each.paused_by}: {each.pause_reason or 'no reason given'}"
            if each.paused
            else relative(each.seen_at, now),
        )
        for each in found
    ]
    columns = (
        *("handler…", "app…", "release", "queue…", "attempts#", "timeout#", "delivery", "nodes#", ""),
        "registered, or paused by…",
    )
    console().print(table(None, *columns, rows=rows))


@app.command()
def pause(
    names: Names,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Keep the jobs of handlers from being claimed, from the next poll on; their queues go on. What runs, runs on."""
    with using(config_file, dsn, embedded=embedded) as config:
        pausing.pause(config, "handler", list(dict.fromkeys(names)), reason, as_json=as_json)


@app.command()
def resume(
    names: Names,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Let the jobs of paused handlers be claimed again."""
    with using(config_file, dsn, embedded=embedded) as config:
        pausing.resume(config, "handler", list(dict.fromkeys(names)), reason, as_json=as_json)
