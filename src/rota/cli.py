"""The command line: the commands in their help groups, and the exit code for each kind of error.

0 success · 1 failure, or findings · 2 usage or configuration · 3 database or schema
"""

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rota.commands import (
    call,
    check,
    config,
    cron,
    dead,
    enqueue,
    handler,
    job,
    limit,
    migrate,
    node,
    queue,
    run,
    schedule,
    status,
    why,
)
from rota.commands.options import AsJson
from rota.commands.printing import printable
from rota.errors import RotaError, Stopped

FIRST_STEPS, DEPLOY, INSPECT, OPERATE = "First steps", "Run and deploy", "Inspect", "Operate"
SCHEDULES, DEVELOP = "Schedules", "Develop"


class GroupedCommands(TyperGroup):
    """Lists the commands in the help under the name of their group, in the order of registration."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, sorted by group."""
        groups = [FIRST_STEPS, DEPLOY, INSPECT, OPERATE, SCHEDULES, DEVELOP]
        return sorted(super().list_commands(ctx), key=lambda name: groups.index(self._group(name)))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section of the help for each group."""
        rows: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name in self.list_commands(ctx):
            text = self.commands[name].get_short_help_str(formatter.width - width - 6)
            rows.setdefault(self._group(name), []).append((name.ljust(width), text))
        for group, commands in rows.items():
            with formatter.section(group):
                formatter.write_dl(commands)

    def _group(self, name: str) -> str:
        return str(getattr(self.commands[name], "rich_help_panel", None))


app = typer.Typer(
    name="rota",
    cls=GroupedCommands,
    help="Cron for a fleet, on the PostgreSQL that you already run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


@app.command(rich_help_panel=FIRST_STEPS)
def demo(as_json: AsJson = False) -> None:
    """Watch three daemons survive a kill, on a temporary PostgreSQL.

    The report at the end says what happened to every job.
    """
    from rota.demo.main import main

    raise typer.Exit(main(json_output=as_json))


app.command(rich_help_panel=FIRST_STEPS)(run.dev)
app.command(rich_help_panel=DEPLOY)(run.run)
app.command(rich_help_panel=DEPLOY)(migrate.migrate)
app.command(rich_help_panel=DEPLOY)(config.config)
app.command(rich_help_panel=DEPLOY)(check.check)
app.command(rich_help_panel=INSPECT)(status.status)
app.command(rich_help_panel=INSPECT)(why.why)
app.command(rich_help_panel=OPERATE)(enqueue.enqueue)
app.add_typer(job.app, rich_help_panel=OPERATE)
app.add_typer(dead.app, rich_help_panel=OPERATE)
app.add_typer(queue.app, rich_help_panel=OPERATE)
app.add_typer(handler.app, rich_help_panel=OPERATE)
app.add_typer(limit.app, rich_help_panel=OPERATE)
app.add_typer(node.app, rich_help_panel=OPERATE)
app.add_typer(schedule.app, rich_help_panel=SCHEDULES)
app.add_typer(cron.app, rich_help_panel=SCHEDULES)
app.command(rich_help_panel=DEVELOP)(call.call)


@app.command(
    rich_help_panel=DEVELOP,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure the speed of rota, in a temporary database."""
    from rota.bench import bench_app

    bench_app(context.args, prog_name="rota bench")


def _print_version(requested: bool) -> None:
    if requested:
        from rota import __version__
        from rota.cron import tzdata_version

        typer.echo(f"rota {__version__} (tzdata {tzdata_version()})")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions of rota and its time zones."
        ),
    ] = False,
) -> None:
    del version


def _open_missing_streams() -> None:
    """Open /dev/null for each closed standard stream. Otherwise the next socket would get its number, and receive our output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """Run the command in sys.argv. Exits with a code above 0 if it fails."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except RotaError as error:
        typer.echo(f"rota: {printable(error)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except Stopped:
        sys.exit(0)
