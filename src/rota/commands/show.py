"""How things look: tables for people, JSON for programs."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console
    from rich.table import Table

WIDE = 160
"""Columns where nobody looks: a pipe, a file."""

COLOURS = {
    "running": "cyan",
    "due": "blue",
    "retrying": "yellow",
    "succeeded": "green",
    "dead": "red",
    "expired": "magenta",
    "cancelled": "dim",
    "discarded": "dim",
    "future": "dim",
}


def print_json(value: object) -> None:
    """Print one JSON value: instants in ISO 8601, durations in seconds."""
    typer.echo(_escaped(json.dumps(_plain(value), indent=2, ensure_ascii=False)))


def _escaped(text: str) -> str:
    """The same JSON, without what a terminal would obey; what can't be printed can only stand inside of strings."""
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain(fields_of(value))
        case _:
            return str(value)


def fields_of(value: "DataclassInstance") -> dict[str, Any]:
    """Return a dataclass's fields by name, as they are. asdict() copies them: some ids and zones can't be copied."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def console() -> "Console":
    """What is printed to: as wide as the terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def table(title: str | None, *columns: str, rows: Iterable[Sequence[object]]) -> "Table":
    """Lay out a table. A column whose name ends in `#` holds numbers. Where it is narrow, `…` may be cut, `~` broken into lines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    laid = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, show_edge=False
    )
    for name in columns:
        gives = name.endswith(("…", "~"))
        laid.add_column(
            name.rstrip("#…~"),
            justify="right" if name.endswith("#") else "left",
            no_wrap=not gives,  # of what doesn't fit, the others are cut first
            overflow="fold" if name.endswith("~") else "ellipsis",
            min_width=6 if name.endswith("…") else None,
        )
    for row in rows:
        laid.add_row(*(Text(printable(cell), style=COLOURS.get(str(cell), "")) for cell in row))
    return laid


def printable(value: object) -> str:
    """Write it without what a terminal would obey: notes and error texts come from whoever wrote them."""
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def age(value: timedelta | None) -> str:
    """Write a duration in two units at most: `12s`, `3m 5s`, `2h 4m`, `9d 3h`."""
    if value is None:
        return ""
    seconds = int(value.total_seconds())
    if seconds < 0:
        return f"-{age(-value)}"
    sizes = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    parts: list[str] = []
    for unit, size in sizes:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part) or "0s"


def moment(value: datetime | None) -> str:
    """Write an instant in UTC, to the second."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def relative(value: datetime | None, now: datetime) -> str:
    """Write an instant with its distance from `now`: `2026-03-01 09:00:00Z (in 3m 5s)`."""
    if value is None:
        return ""
    return f"{moment(value)} ({distance(value, now)})"


def distance(value: datetime | None, now: datetime) -> str:
    """Write how far an instant is from `now`: `in 3m 5s`, `3m 5s ago`."""
    if value is None:
        return ""
    return f"in {age(value - now)}" if value >= now else f"{age(now - value)} ago"


def plural(count: int, noun: str) -> str:
    """Write `1 job`, `1,200 jobs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
