"""Compare tests/public_surface.txt, the list of all public names, with the code.

The file lists exported Python names with their signatures, configuration keys, metrics, commands with their options,
and SQL objects. With --write the file is created anew.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import rota
import rota.cron
import rota.testing
from rota.bench import bench_app
from rota.cli import app as cli
from rota.config import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_suffix(".txt")


def main() -> int:
    """Return 0 if the file matches the code or was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    current = public_names_text()
    if parser.parse_args().write:
        SNAPSHOT.write_text(current, "utf-8")
        return 0
    stored = SNAPSHOT.read_text("utf-8") if SNAPSHOT.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(stored.splitlines(True), current.splitlines(True), SNAPSHOT.name, "the code")
    )
    if stored != current:
        sys.stdout.write(
            "The public surface has changed: run `make surface`, and name the change in docs/changelog.md\n"
        )
    return int(stored != current)


def public_names_text() -> str:
    """Return the content that the file must have."""
    sections = {
        "Python": [line for module in (rota, rota.testing, rota.cron) for line in _python(module)],
        "Configuration": sorted(SETTINGS),
        "Metrics": sorted(_metrics()),
        "Commands": [
            *_commands(typer.main.get_command(cli), "rota"),
            *_commands(typer.main.get_command(bench_app), "rota bench"),
        ],
        "SQL": sorted(_sql((ROOT / "sql" / "schema.sql").read_text("utf-8"))),
    }
    return "\n".join(f"== {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items())


def _python(module: ModuleType) -> Iterator[str]:
    for name in sorted(getattr(module, "__all__", [])):
        value = getattr(module, name)
        yield f"{module.__name__}.{name}{_signature(value)}"
        if inspect.isclass(value):
            for member in sorted(vars(value).keys() | {each for base in value.__mro__[1:-1] for each in vars(base)}):
                if not member.startswith("_") and _is_ours(value, member):
                    yield f"{module.__name__}.{name}.{member}{_signature(inspect.getattr_static(value, member))}"


def _is_ours(owner: type, member: str) -> bool:
    return any(member in vars(base) and base.__module__.split(".")[0] == "rota" for base in owner.__mro__)


def _signature(value: Any) -> str:
    if isinstance(value, property):
        return ""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    try:
        text = str(inspect.signature(value)) if callable(value) else ""
    except (TypeError, ValueError):
        return ""
    # The module that defines a type and the address of a default are not public.
    return re.sub(r"'|\brota\.(\w+\.)*|<factory>", "", re.sub(r"<([\w.]+) object at 0x\w+>", r"<\1>", text))


def _metrics() -> Iterator[str]:
    for file in (ROOT / "src" / "rota").rglob("metrics.py"):
        yield from re.findall(r'"(rota_[a-z_]+)"', file.read_text("utf-8"))


def _commands(command: Any, path: str) -> Iterator[str]:
    if children := getattr(command, "commands", None):
        for name in sorted(children):
            yield from _commands(children[name], f"{path} {name}")
        return
    options = [
        ("/".join(each.opts + each.secondary_opts) if each.opts[0].startswith("-") else each.name.upper())
        for each in command.params
    ]
    yield " ".join([path, *sorted(options)])


def _sql(schema: str) -> Iterator[str]:
    for match in re.finditer(
        r"^CREATE (TABLE|VIEW|SEQUENCE) (rota\.\w+)(?: \((.*?)^\))?", schema, re.MULTILINE | re.DOTALL
    ):
        kind, name, body = match.groups()
        yield f"{kind.lower()} {name}"
        for column in re.findall(
            r"^    (\w+) ([a-z].*?)(?: DEFAULT| NOT NULL| GENERATED|,|$)", body or "", re.MULTILINE
        ):
            if column[0] != "CONSTRAINT":
                yield f"column {name}.{column[0]} {column[1]}"
    for match in re.finditer(r"^CREATE FUNCTION (rota\.\w+\(.*?\)) RETURNS (.*)$", schema, re.MULTILINE):
        if "trigger" not in match[2].split():
            yield f"function {match[1]} returns {match[2]}"


if __name__ == "__main__":
    sys.exit(main())
