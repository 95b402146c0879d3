"""`rota handler`: what can be called, who can call it, and stopping it."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands import pausing
from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, Reason
from rota.commands.session import ask, using
from rota.commands.show import LISTED, age, console, distance, plural, print_json, table

if TYPE_CHECKING:
    from rota.db.node_reports import KnownHandler

app = typer.Typer(name="handler", help="Look at handlers, pause them, let them go on.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="HANDLER", show_default=False, help="Which.")]


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List the handlers that daemons have registered, how many living daemons have them, and which are paused and why."""
    from rota.db.node_reports import list_handlers

    with using(config_file, dsn, embedded=embedded) as config:
        found = ask(config, lambda db: list_handlers(db, limit=LISTED), name="handler list")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.handler,
            each.queue or "default",
            1 if each.delivery == "at_most_once" else each.max_attempts or 20,
            age(each.timeout),
            each.nodes,
            _state(each),
        )
        for each in found
    ]
    # What fits a terminal of 80 columns; app, release, delivery and the instants are in --json.
    console().print(table(None, "handler~", "queue~", "attempts#", "timeout#", "nodes#", "state~", rows=rows))
    if found and (more := found[0].total - len(found)):
        console().print(
            f"… and {plural(more, 'more handler')}; paused ones and those of living daemons are listed first"
        )


def _state(handler: "KnownHandler") -> str:
    if handler.paused:
        return f"paused by {handler.paused_by}: {handler.pause_reason or 'no reason given'}"
    if handler.nodes:
        return f"registered {distance(handler.seen_at, handler.now)}"
    if handler.seen_at is None:
        return "no daemon has ever registered it"
    return f"no living daemon has it, seen {distance(handler.seen_at, handler.now)}"


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
