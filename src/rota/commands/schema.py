"""`rota migrate`: bring the schema to this version, say what is missing, or print it."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import finish, using

if TYPE_CHECKING:
    from rota.config import Config


def migrate_database(config: "Config") -> None:
    """Bring the schema to this version, for commands that own their database."""
    from rota.db.migrate import migrate as bring_up_to_date

    url = config.require_direct_database()
    finish(url, bring_up_to_date(url))


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if something is missing.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print all migrations as SQL, for a tool of your own.")] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make or upgrade the schema `rota` in the database. Safe to run again, and by several at once."""
    import json

    from rota.db import migrate as schema

    if sql:
        typer.echo(schema.script(), nl=False)
        return
    with using(config_file, dsn, embedded=embedded) as config:
        url = config.require_direct_database()
        if check:
            found = finish(url, schema.missing(url))
            word, exit_code = "missing", 1 if found else 0
        else:
            found, exit_code = list(finish(url, schema.migrate(url)).applied), 0
            word = "applied"
    if as_json:
        typer.echo(json.dumps({word: found, "version": schema.VERSION}))
    else:
        for name in found:
            typer.echo(f"{word} {name}")
        if check and found:
            typer.echo("run `rota migrate`", err=True)
        elif not found or not check:
            typer.echo(f"the schema is at version {schema.VERSION}")
    raise typer.Exit(exit_code)
