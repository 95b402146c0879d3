"""`rota config`: the settings in effect, each with its source."""

from typing import TYPE_CHECKING

import typer

from rota.commands.database import load_config
from rota.commands.options import App, AsJson, ConfigFile, Dsn
from rota.commands.printing import print_json

if TYPE_CHECKING:
    from rota.config import Config


def config(app: App = None, config_file: ConfigFile = None, dsn: Dsn = None, as_json: AsJson = False) -> None:
    """Print every setting with its source, and mask passwords."""
    loaded = load_config(config_file, {"database.url": dsn, "app": app})
    if as_json:
        print_json({"values": loaded.masked(), "sources": _sources(loaded), "warnings": [*map(str, loaded.warnings)]})
        return
    typer.echo(loaded.rendered(), nl=False)
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _sources(loaded: "Config") -> dict[str, str]:
    single_settings = {"queues"}  # a table in the file, but one setting
    sources: dict[str, str] = {}
    for name, value in loaded.masked().items():
        is_section = isinstance(value, dict) and name not in single_settings
        paths = [f"{name}.{key}" for key in value] if is_section else [name]
        sources |= {path: loaded.source(path) for path in paths}
    return sources
