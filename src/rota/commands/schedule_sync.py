"""`rota schedule sync`: bring what code declares into the database."""

from typing import Annotated

import typer

from rota.commands.options import App, AsJson, ConfigFile, DryRun, Dsn, Embedded
from rota.commands.session import ask, configure, find_named_app, using
from rota.commands.show import console, plural, print_json, table


def sync(
    app: App = None,
    dry_run: DryRun = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what this app declared once and no longer does.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also over a newer release's declaration, or somebody else's schedule.")
    ] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schedules that an app's code declares into the database, as its daemons do at their start."""
    found = find_named_app(configure(config_file, dsn, {"app": app}))
    declared = found.schedules
    with using(config_file, dsn, embedded=embedded, overrides={"app": app}) as config:
        from rota.services import declarations

        steps = ask(
            config,
            lambda db: declarations.apply(
                db,
                app=found.name,
                release=found.release,
                declarations=declared,
                force=force,
                prune=prune,
                dry_run=dry_run,
            ),
            name="schedule sync",
        )
    said = [(step.name, "removed" if prune and step.what == "undeclared" else step.what, step.why) for step in steps]
    if as_json:
        print_json(
            {
                "app": found.name,
                "dry_run": dry_run,
                "schedules": [{"name": n, "became": w, "why": y} for n, w, y in said],
            }
        )
    else:
        rows = [(name, what.replace("_", " "), "" if what == "removed" else why) for name, what, why in said]
        console().print(table(None, "schedule…", "became", "", rows=rows))
        count = plural(sum(step.writes for step in steps), "schedule")
        typer.echo(f"{'dry run, nothing was changed: ' if dry_run else ''}{count} written, of {len(steps):,}", err=True)
    if any(step.what == "refused" for step in steps):
        raise typer.Exit(1)
