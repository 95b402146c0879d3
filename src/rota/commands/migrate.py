"""`rota migrate`: bring the schema to this version, say what is missing, or print it."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import finish, using

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rota.config import Config


def migrate_database(config: "Config") -> None:
    """Bring the schema to this version, for commands that own their database: the embedded one."""
    from rota.db.migrate import migrate as bring_up_to_date
    from rota.embedded import default_data_dir
    from rota.errors import SchemaMismatch

    url = config.direct_database_url()
    try:
        finish(url.dsn, bring_up_to_date(url))
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{error}. Or, if nothing in it matters, remove {default_data_dir()}") from None


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if something is missing.")] = False,
    roles: Annotated[
        bool, typer.Option("--roles", help="Make the four roles, too, and give them their rights.")
    ] = False,
    role_prefix: Annotated[
        str | None, typer.Option("--role-prefix", metavar="NAME", help="Of their names.", show_default="rota")
    ] = None,
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print all migrations (with --roles: the roles) as SQL, for a tool of your own."),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="N|database",
            help="With --sql: only what a database at version N lacks, or the connected one.",
            show_default="0",
        ),
    ] = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make or upgrade the schema `rota` in the database. Safe to run again, and by several at once."""
    import json

    from rota.db import migrate as schema

    prefix = _checked_prefix(roles, role_prefix)
    if check and roles:
        raise typer.BadParameter("looks at migrations alone; rights are set anew by each --roles", param_hint="--check")
    version = _checked_version(start, schema.VERSION)
    if start is not None and (roles or not sql):
        raise typer.BadParameter("goes with --sql, and without --roles", param_hint="--from")
    if sql and prefix:
        typer.echo(schema.roles_script(prefix), nl=False)
        return
    if sql:
        _print_sql(version, lambda: using(config_file, dsn, embedded=embedded))
        return
    with using(config_file, dsn, embedded=embedded) as config:
        url = config.direct_database_url()
        if check:
            report = schema.Applied(applied=finish(url.dsn, schema.list_missing(url)), version=schema.VERSION)
            word, exit_code = "missing", 1 if report.applied else 0
        else:
            waiting = schema.migrate(url, role_prefix=prefix, say=lambda text: typer.echo(f"note: {text}", err=True))
            report, exit_code = finish(url.dsn, waiting), 0
            word = "applied"
    for said in report.notices:
        typer.echo(f"note: {said}", err=True)
    if as_json:
        made = {"roles": report.roles} if report.roles else {}
        typer.echo(json.dumps({word: report.applied, "version": report.version, **made}))
        raise typer.Exit(exit_code)
    for name in report.applied:
        typer.echo(f"{word} {name}")
    if check and report.applied:
        typer.echo("run `rota migrate`", err=True)
    else:
        newer = f", newer than this rota's {schema.VERSION} and fit for it" if report.version > schema.VERSION else ""
        typer.echo(f"the schema is at version {report.version}{newer}")
    if report.roles:
        typer.echo(f"rights given to {', '.join(report.roles)}")
    raise typer.Exit(exit_code)


def _print_sql(version: int | None, database: "Callable[[], AbstractContextManager[Config]]") -> None:
    from rota.db import migrate as schema

    if version is None:
        with database() as config:
            url = config.require_direct_database()
            version = finish(url, schema.schema_version(url))
    typer.echo(schema.script(version), nl=False)
    if version:
        typer.echo("note: then apply `rota migrate --roles --sql`, for the roles' rights on what is new", err=True)


def _checked_version(text: str | None, newest: int) -> int | None:
    """Return the version to start from, None for the connected database's."""
    if text == "database":
        return None
    if text is None:
        return 0
    if not (text.isdecimal() and text.isascii() and int(text) <= newest):
        raise typer.BadParameter(f"{text!r}: write a version from 0 to {newest}, or `database`", param_hint="--from")
    return int(text)


def _checked_prefix(roles: bool, role_prefix: str | None) -> str | None:
    import re

    if role_prefix is not None and not roles:
        raise typer.BadParameter("goes with --roles", param_hint="--role-prefix")
    if role_prefix is not None and (
        not re.fullmatch(r"[a-z_][a-z0-9_]{0,49}", role_prefix) or role_prefix.startswith("pg_")
    ):
        raise typer.BadParameter(
            f"{role_prefix!r} must be up to 50 small letters, digits and underscores, and not begin with pg_",
            param_hint="--role-prefix",
        )
    return (role_prefix or "rota") if roles else None
