"""`rota schedule sync`: write the schedules that an app declares in code to the database."""

from typing import Annotated

import typer

from rota.commands.database import Database, import_app, takes_database
from rota.commands.options import App, AsJson, DryRun
from rota.commands.printing import console, plural, print_json, table


@takes_database
def sync(
    database: Database,
    app: App = None,
    dry_run: DryRun = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove schedules that the app no longer declares.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite schedules of a newer release, another app or a person.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the schedules that an app declares in code to the database.

    Daemons do the same when they start.
    """
    from rota.services import declarations

    declaring_app = import_app(database.load_config({"app": app}))
    steps = database.run(
        lambda db: declarations.apply(
            db,
            app=declaring_app.name,
            release=declaring_app.release,
            declarations=declaring_app.schedules,
            force=force,
            prune=prune,
            dry_run=dry_run,
        ),
        name="schedule sync",
        overrides={"app": app},
    )
    results = [(step.name, "removed" if prune and step.what == "undeclared" else step.what, step.why) for step in steps]
    if as_json:
        schedules = [{"name": name, "became": what, "why": why} for name, what, why in results]
        print_json({"app": declaring_app.name, "dry_run": dry_run, "schedules": schedules})
    else:
        rows = [(name, what.replace("_", " "), "" if what == "removed" else why) for name, what, why in results]
        console().print(table(None, "schedule…", "outcome", "", rows=rows))
        count = plural(sum(step.writes for step in steps), "schedule")
        typer.echo(f"{'dry run, nothing was changed: ' if dry_run else ''}{count} of {len(steps):,} written", err=True)
    if any(step.what == "refused" for step in steps):
        raise typer.Exit(1)
