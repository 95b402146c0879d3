"""`rota handler`: list, pause and resume handlers."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands import pausing
from rota.commands.database import Database, takes_database
from rota.commands.options import AsJson, Note, argument
from rota.commands.printing import MAX_LISTED, console, format_distance, format_duration, plural, print_json, table

if TYPE_CHECKING:
    from rota.db.node_reports import KnownHandler

app = typer.Typer(name="handler", help="List, pause and resume handlers.", no_args_is_help=True)

Names = Annotated[list[str], argument("HANDLER", "Names of the handlers.")]


@app.command("list")
@takes_database
def list_(database: Database, as_json: AsJson = False) -> None:
    """List the handlers that daemons have registered.

    The table shows how many living daemons have each handler, and which handlers are paused and why.
    """
    from rota.db.node_reports import list_handlers

    handlers = database.run(lambda db: list_handlers(db, limit=MAX_LISTED), name="handler list")
    if as_json:
        print_json(handlers)
        return
    rows = [
        (
            each.handler,
            each.queue or "default",
            1 if each.delivery == "at_most_once" else each.max_attempts or 20,
            format_duration(each.timeout),
            each.nodes,
            _format_state(each),
        )
        for each in handlers
    ]
    # Only the columns that fit 80 characters: app, release, delivery and the instants are in --json.
    console().print(table(None, "handler~", "queue~", "attempts#", "timeout#", "nodes#", "state~", rows=rows))
    if handlers and (unlisted := handlers[0].total - len(handlers)):
        console().print(
            f"… and {plural(unlisted, 'more handler')}. Paused handlers and those of living daemons are listed first"
        )


def _format_state(handler: "KnownHandler") -> str:
    if handler.paused:
        return f"paused by {handler.paused_by}: {handler.pause_reason or 'no reason given'}"
    if handler.nodes:
        return f"registered {format_distance(handler.seen_at, handler.now)}"
    if handler.seen_at is None:
        return "no daemon has ever registered it"
    return f"no living daemon has it, seen {format_distance(handler.seen_at, handler.now)}"


@app.command()
@takes_database
def pause(database: Database, names: Names, note: Note = None, as_json: AsJson = False) -> None:
    """Stop the jobs of handlers from being claimed.

    It takes effect at the next poll. Running jobs continue, and so do other jobs in the same queues.
    """
    pausing.pause(database, "handler", list(dict.fromkeys(names)), note, as_json=as_json)


@app.command()
@takes_database
def resume(database: Database, names: Names, note: Note = None, as_json: AsJson = False) -> None:
    """Let the jobs of paused handlers be claimed again."""
    pausing.resume(database, "handler", list(dict.fromkeys(names)), note, as_json=as_json)
