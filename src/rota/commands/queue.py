"""`rota queue`: what waits in which lane, and stopping lanes."""

from typing import Annotated

import typer

from rota.commands import pausing
from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, Reason
from rota.commands.session import ask, using
from rota.commands.show import age, console, moment, print_json, table

app = typer.Typer(name="queue", help="Look at queues, pause them, let them go on.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="QUEUE", show_default=False, help="Which; or else --all.")]
Every = Annotated[bool, typer.Option("--all", help="Every queue there is or will be.")]


@app.command("list")
def list_(config_file: ConfigFile = None, dsn: Dsn = None, embedded: Embedded = False, as_json: AsJson = False) -> None:
    """List queues with what waits and runs in them, who serves them, and which are paused and why."""
    from rota.commands.status import LOWER_BOUNDS, QueueLine, count, more_queues_line, read_status

    with using(config_file, dsn, embedded=embedded) as config:
        found = ask(config, read_status, name="queue list")
    paused = {each.name: each for each in found.paused if each.kind == "queue"}
    lines = [*found.queues, *(QueueLine(queue=name) for name in paused if name not in {q.queue for q in found.queues})]
    if as_json:
        print_json(
            {
                "queues": lines,
                "paused": list(paused.values()),
                "counted_all": found.counted_all,
                "more_queues": found.more_queues,
                "more": found.more,
                "more_lanes": found.more_lanes,
            }
        )
        return
    rows = [
        (
            line.queue,
            count(line.due, exact=found.counted_all),
            age(line.oldest_due),
            count(line.running),
            count(line.retrying, exact=found.counted_all),
            count(line.future, exact=found.counted_all),
            count(line.dead),
            line.nodes,
            "paused" if {line.queue, "*"} & paused.keys() else "" if line.nodes else "nobody serves it",
        )
        for line in lines
    ]
    columns = (
        "queue~",
        "due#",
        "oldest#",
        "running#",
        "retrying#",
        "future#",
        "dead#",
        "nodes#",
        "",
    )
    out = console()
    out.print(table(None, *columns, rows=rows))
    if found.more:
        out.print(f"… and {more_queues_line(found)}")
    if not found.counted_all:
        out.print(LOWER_BOUNDS)
    if paused:
        stops = [
            (each.name, each.paused_by, moment(each.paused_at), each.reason or "no reason given")
            for each in paused.values()
        ]
        out.print("", table("paused", "queue~", "by~", "since", "why~", rows=stops))


@app.command()
def pause(
    names: Names = None,
    every: Every = False,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Keep the jobs of queues from being claimed, from the next poll on. What runs, runs on."""
    chosen = _chosen(names, every)
    with using(config_file, dsn, embedded=embedded) as config:
        pausing.pause(config, "queue", chosen, reason, as_json=as_json)


@app.command()
def resume(
    names: Names = None,
    every: Every = False,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Let the jobs of paused queues be claimed again. --all undoes pause --all; queues paused by name stay so."""
    chosen = _chosen(names, every)
    with using(config_file, dsn, embedded=embedded) as config:
        pausing.resume(config, "queue", chosen, reason, as_json=as_json)


def _chosen(names: list[str] | None, every: bool) -> list[str]:
    if bool(names) is every:
        raise typer.BadParameter("name queues, or else --all", param_hint="QUEUE")
    return ["*"] if every else list(dict.fromkeys(names or []))
