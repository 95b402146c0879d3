"""`rota config`: what is in force, and who said so."""

from typing import TYPE_CHECKING

import typer

from rota.commands.options import App, AsJson, ConfigFile, Dsn
from rota.commands.session import configure
from rota.commands.show import print_json

if TYPE_CHECKING:
    from rota.config import Config


def config(app: App = None, config_file: ConfigFile = None, dsn: Dsn = None, as_json: AsJson = False) -> None:
    """Print every setting with its source, passwords masked."""
    found = configure(config_file, dsn, {"app": app})
    if as_json:
        print_json({"values": found.masked(), "sources": _sources(found), "warnings": [*map(str, found.warnings)]})
        return
    typer.echo(found.rendered(), nl=False)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _sources(found: "Config") -> dict[str, str]:
    tables = {"queues"}  # a mapping, but one setting
    sources: dict[str, str] = {}
    for name, value in found.masked().items():
        paths = [f"{name}.{key}" for key in value] if isinstance(value, dict) and name not in tables else [name]
        sources |= {path: found.source(path) for path in paths}
    return sources
