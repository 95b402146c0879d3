"""`rota schedule sync`: write the schedules and limits that an app declares in code to the database."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, import_app, takes_database
from rota.commands.options import App, AsJson, DryRun
from rota.commands.printing import console, plural, print_json, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rota.db.pool import Connection
    from rota.domain.declaration import Declaration, Step


@takes_database
def sync(
    database: Database,
    app: App = None,
    dry_run: DryRun = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what the app no longer declares.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite those of a newer release, another app or a person.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the schedules and limits that an app declares in code to the database.

    Daemons do the same when they start.
    """
    from rota.services import declarations

    declaring_app = import_app(database.load_config({"app": app}))

    async def apply(db: "Connection", kind: "declarations.Kind", declared: "Mapping[str, Declaration]") -> "list[Step]":
        return await declarations.apply(
            db,
            kind,
            app=declaring_app.name,
            release=declaring_app.release,
            declarations=declared,
            force=force,
            prune=prune,
            dry_run=dry_run,
        )

    async def apply_all(db: "Connection") -> "tuple[list[Step], list[Step]]":
        return (
            await apply(db, declarations.SCHEDULES, declaring_app.schedules),
            await apply(db, declarations.LIMITS, declaring_app.limits),
        )

    schedules, limits = database.run(apply_all, name="schedule sync", overrides={"app": app})
    results = {
        kind: [(step.name, "removed" if prune and step.what == "undeclared" else step.what, step.why) for step in steps]
        for kind, steps in (("schedule", schedules), ("limit", limits))
    }
    if as_json:
        shown = {
            f"{kind}s": [{"name": name, "became": what, "why": why} for name, what, why in steps]
            for kind, steps in results.items()
        }
        print_json({"app": declaring_app.name, "dry_run": dry_run, **shown})
    else:
        out = console()
        for kind, steps in results.items():
            if steps or kind == "schedule":
                rows = [(name, what.replace("_", " "), "" if what == "removed" else why) for name, what, why in steps]
                out.print(table(None, f"{kind}…", "outcome", "", rows=rows))
        counts = " and ".join(
            f"{plural(sum(step.writes for step in steps), kind)} of {len(steps):,}"
            for kind, steps in (("schedule", schedules), ("limit", limits))
            if steps or kind == "schedule"
        )
        typer.echo(f"{'dry run, nothing was changed: ' if dry_run else ''}{counts} written", err=True)
    if any(step.what == "refused" for step in (*schedules, *limits)):
        raise typer.Exit(1)
