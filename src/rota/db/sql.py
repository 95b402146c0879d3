"""The files under sql/, read once at import.

A wheel contains them inside of the package. In a source tree or an editable install they are at the top level. Both are found
relative to this file, because an editable install also leaves an outdated copy in site-packages.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGE = Path(__file__).resolve().parent.parent


def _root() -> Path:
    for folder in (_PACKAGE / "_sql", _PACKAGE.parent.parent / "sql"):
        if (folder / "queries").is_dir():
            return folder
    raise FileNotFoundError(
        f"rota's SQL files are missing: looked in {_PACKAGE / '_sql'} and beside src/; reinstall rota"
    )


def _read(folder: str) -> Mapping[str, str]:
    return MappingProxyType({file.stem: file.read_text("utf-8") for file in sorted((_root() / folder).rglob("*.sql"))})


SQL: Mapping[str, str] = _read("queries")
"""name -> text of sql/queries/<folder>/<name>.sql, one statement each, with parameters $1, $2, …"""

MIGRATIONS: Mapping[str, str] = _read("migrations")
"""`0001_schema` -> text of sql/migrations/0001_schema.sql, in the order in which they are applied."""

ROLES: str = (_root() / "roles.sql").read_text("utf-8")
"""Text of sql/roles.sql, which creates the roles and grants their rights. The setting rota.role_prefix begins their names."""

OBJECTS: str = (_root() / "objects.txt").read_text("utf-8")
"""Text of sql/objects.txt: a line `kind, name, detail`, separated by tabs, for each object that the migrations make."""
