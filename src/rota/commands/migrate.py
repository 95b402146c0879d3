"""`rota migrate`: upgrade the schema, list missing migrations, or print them as SQL."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, run_explained, takes_database
from rota.commands.options import AsJson, option

if TYPE_CHECKING:
    from rota.config import Config


def migrate_database(config: "Config") -> None:
    """Upgrade the schema of the embedded database. Raises SchemaMismatch."""
    from rota.db.migrate import migrate as apply_migrations
    from rota.embedded import default_data_dir
    from rota.errors import SchemaMismatch

    url = config.direct_database_url()
    try:
        run_explained(url.dsn, apply_migrations(url))
    except SchemaMismatch as error:
        raise SchemaMismatch(
            f"{error}. If you don't need its data, you can remove {default_data_dir()} instead"
        ) from None


@takes_database
def migrate(
    database: Database,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing. Exit code 1 if a migration is missing.")
    ] = False,
    roles: Annotated[bool, typer.Option("--roles", help="Also create the four roles, and grant their rights.")] = False,
    role_prefix: Annotated[
        str | None, option("--role-prefix", "NAME", "Prefix of the roles' names.", show_default="rota")
    ] = None,
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print the migrations, or with --roles the roles, as SQL for your own tool."),
    ] = False,
    start: Annotated[
        str | None,
        option(
            "--from",
            "VERSION",
            "With --sql: print only later migrations. `database` means the version of the connected database.",
            show_default="0",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create or upgrade the schema `rota` in the database.

    It is safe to repeat the command, and to run it several times at once.
    """
    import json

    from rota.db import migrate as schema

    prefix = _parse_prefix(roles, role_prefix)
    if check and roles:
        raise typer.BadParameter("checks only migrations and can't be combined with --roles", param_hint="--check")
    version = _parse_version(start, schema.VERSION)
    if start is not None and (roles or not sql):
        raise typer.BadParameter("needs --sql, and can't be combined with --roles", param_hint="--from")
    if sql and prefix:
        typer.echo(schema.roles_script(prefix), nl=False)
        return
    if sql:
        _print_sql(version, database)
        return
    with database.configured() as config:
        url = config.direct_database_url()
        if check:
            report = schema.Applied(applied=run_explained(url.dsn, schema.list_missing(url)), version=schema.VERSION)
            word, exit_code = "missing", 1 if report.applied else 0
        else:
            migration = schema.migrate(url, role_prefix=prefix, say=lambda text: typer.echo(f"note: {text}", err=True))
            report, exit_code = run_explained(url.dsn, migration), 0
            word = "applied"
    for notice in report.notices:
        typer.echo(f"note: {notice}", err=True)
    if as_json:
        roles_json = {"roles": report.roles} if report.roles else {}
        typer.echo(json.dumps({word: report.applied, "version": report.version, **roles_json}))
        raise typer.Exit(exit_code)
    for name in report.applied:
        typer.echo(f"{word} {name}")
    if check and report.applied:
        typer.echo("to apply them: rota migrate", err=True)
    else:
        newer = (
            f", which is newer than this rota's {schema.VERSION} but compatible"
            if report.version > schema.VERSION
            else ""
        )
        typer.echo(f"the schema is at version {report.version}{newer}")
    if report.roles:
        typer.echo(f"rights granted to {', '.join(report.roles)}")
    raise typer.Exit(exit_code)


def _print_sql(version: int | None, database: Database) -> None:
    from rota.db import migrate as schema

    if version is None:
        with database.configured() as config:
            url = config.require_direct_database()
            version = run_explained(url, schema.schema_version(url))
    typer.echo(schema.script(version), nl=False)
    if version:
        typer.echo(
            "note: afterwards apply the output of `rota migrate --roles --sql`, which grants the rights",
            err=True,
        )


def _parse_version(text: str | None, newest: int) -> int | None:
    """Return the version to start from, None for the version of the connected database."""
    if text == "database":
        return None
    if text is None:
        return 0
    if not (text.isdecimal() and text.isascii() and int(text) <= newest):
        raise typer.BadParameter(f"{text!r}: write a version from 0 to {newest}, or `database`", param_hint="--from")
    return int(text)


def _parse_prefix(roles: bool, role_prefix: str | None) -> str | None:
    import re

    if role_prefix is not None and not roles:
        raise typer.BadParameter("needs --roles", param_hint="--role-prefix")
    if role_prefix is not None and (
        not re.fullmatch(r"[a-z_][a-z0-9_]{0,49}", role_prefix) or role_prefix.startswith("pg_")
    ):
        raise typer.BadParameter(
            f"{role_prefix!r} is not valid: use up to 50 lower-case letters, digits and underscores, and do not begin with pg_",
            param_hint="--role-prefix",
        )
    return (role_prefix or "rota") if roles else None
