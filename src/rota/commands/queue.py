"""`rota queue`: list, pause and resume queues."""

from typing import Annotated

import typer

from rota.commands import pausing
from rota.commands.database import Database, takes_database
from rota.commands.options import AsJson, Note, argument
from rota.commands.printing import console, format_instant, print_json, table
from rota.commands.queue_lines import QueueLine, queue_table
from rota.commands.status import LOWER_BOUNDS, more_queues_text, read_status

app = typer.Typer(name="queue", help="List, pause and resume queues.", no_args_is_help=True)

Names = Annotated[list[str] | None, argument("QUEUE", "Names of the queues. Give these or --all.")]
All = Annotated[bool, typer.Option("--all", help="Every queue, including future ones.")]


@app.command("list")
@takes_database
def list_(database: Database, as_json: AsJson = False) -> None:
    """List queues with their waiting and running jobs.

    The table also shows how many daemons serve each queue, and which queues are paused and why.
    """
    status = database.run(read_status, name="queue list")
    paused = {each.name: each for each in status.paused if each.kind == "queue"}
    listed = {line.queue for line in status.queues}
    lines = [*status.queues, *(QueueLine(queue=name) for name in paused if name not in listed)]
    if as_json:
        print_json(
            {
                "queues": lines,
                "paused": list(paused.values()),
                "counted_all": status.counted_all,
                "more_queues": status.more_queues,
                "more": status.more,
                "more_lanes": status.more_lanes,
            }
        )
        return
    out = console()
    out.print(queue_table(None, lines, paused.keys(), exact=status.counted_all))
    if status.more:
        out.print(f"… and {more_queues_text(status)}")
    if not status.counted_all:
        out.print(LOWER_BOUNDS)
    if paused:
        pauses = [
            (each.name, each.paused_by, format_instant(each.paused_at), each.reason or "no reason given")
            for each in paused.values()
        ]
        out.print("", table("paused", "queue~", "by~", "since", "why~", rows=pauses))


@app.command()
@takes_database
def pause(
    database: Database, names: Names = None, every: All = False, note: Note = None, as_json: AsJson = False
) -> None:
    """Stop the jobs of queues from being claimed.

    It takes effect at the next poll. Running jobs continue.
    """
    pausing.pause(database, "queue", _selected(names, every), note, as_json=as_json)


@app.command()
@takes_database
def resume(
    database: Database, names: Names = None, every: All = False, note: Note = None, as_json: AsJson = False
) -> None:
    """Let the jobs of paused queues be claimed again.

    --all ends only a pause with --all: queues that were paused by name stay paused.
    """
    pausing.resume(database, "queue", _selected(names, every), note, as_json=as_json)


def _selected(names: list[str] | None, every: bool) -> list[str]:
    if bool(names) is every:
        raise typer.BadParameter("give names of queues or --all", param_hint="QUEUE")
    return ["*"] if every else list(dict.fromkeys(names or []))
