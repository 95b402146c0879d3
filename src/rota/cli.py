"""The command line: which commands there are, and the exit code that each error ends one with.

0 done · 1 failed, or findings · 2 usage or configuration · 3 database or schema
"""

import io
import os
import sys
from typing import Annotated

import typer

from rota.commands import (
    call,
    check,
    cron,
    dead,
    enqueue,
    handler,
    job,
    node,
    queue,
    run,
    schedule,
    status,
    why,
)
from rota.commands import (
    config as settings,
)
from rota.commands import (
    migrate as schema,
)
from rota.commands.options import AsJson
from rota.commands.show import printable
from rota.errors import RotaError, Stopped

app = typer.Typer(
    name="rota",
    help="Cron for a fleet, on the PostgreSQL that you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(run.dev)


@app.command()
def demo(as_json: AsJson = False) -> None:
    """See it work: a PostgreSQL of its own, three daemons, one of them killed; and what became of every job."""
    from rota.demo.main import main

    raise typer.Exit(main(json_output=as_json))


app.command()(schema.migrate)
app.command()(check.check)
app.command()(settings.config)
app.command()(status.status)
app.command()(enqueue.enqueue)
app.command()(call.call)
app.add_typer(job.app)
app.add_typer(queue.app)
app.add_typer(handler.app)
app.add_typer(node.app)
app.add_typer(schedule.app)
app.add_typer(cron.app)
app.add_typer(dead.app)
app.command()(why.why)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure rota on this machine, in a database of its own."""
    from rota.bench import bench_app

    bench_app(context.args, prog_name="rota bench")


def _version(asked: bool) -> None:
    if asked:
        from rota import __version__
        from rota.cron import tzdata_version

        typer.echo(f"rota {__version__} (tzdata {tzdata_version()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which rota and which time zones.")
    ] = False,
) -> None:
    del version


def _open_what_is_closed() -> None:
    """Have the three standard streams lead somewhere, or else the next sockets take their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """Run the command that the arguments name."""
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # names may hold what the terminal's encoding has no letter for
    try:
        app()
    except RotaError as error:
        typer.echo(f"rota: {printable(error)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except Stopped:
        sys.exit(0)
