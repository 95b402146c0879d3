"""Format output: tables, times and numbers for people, JSON for programs."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH = 160
"""Width in characters if the output is not a terminal."""

MAX_LISTED = 100
"""Maximum number of rows in a list without --limit."""

MIN_COLUMN_WIDTH = 6
"""Minimum characters for a column that may be truncated or wrapped."""

COLUMN_GAP = 3
"""Characters between two columns."""

COLOURS = {
    "running": "cyan",
    "due": "blue",
    "limited": "yellow",
    "retrying": "yellow",
    "succeeded": "green",
    "dead": "red",
    "expired": "magenta",
    "cancelled": "dim",
    "discarded": "dim",
    "future": "dim",
}


def print_json(value: object) -> None:
    """Print a JSON value, with instants in ISO 8601 and durations in seconds."""
    typer.echo(_escape_controls(json.dumps(_to_json(value), indent=2, ensure_ascii=False)))


def _escape_controls(text: str) -> str:
    """Escape control characters, which a terminal could execute. In JSON they occur only inside strings."""
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _to_json(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case dict():
            return {key: _to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_json(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _to_json(fields_of(value))
        case _:
            return str(value)


def fields_of(value: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of a dataclass by name. dataclasses.asdict() would copy the values, and some can't be copied."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def console() -> "Console":
    """Return a console for standard output, as wide as the terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False, emoji=False)


class AdaptiveTable:
    """A table. If the terminal is too narrow, each row is printed as a block of `column  value` lines."""

    def __init__(self, title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._title = title
        self._columns = columns
        self._rows = [[printable(cell) for cell in row] for row in rows]

    def __rich_console__(self, _: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        """Yield the renderables for rich."""
        if self._min_width <= options.max_width:
            yield self._table()
        else:
            yield from self._blocks()

    @property
    def _min_width(self) -> int:
        """The width in which every column is readable. Columns that can't shrink need their full width."""
        total = (len(self._columns) - 1) * COLUMN_GAP
        for number, column in enumerate(self._columns):
            name = column.rstrip("#…~")
            longest = max((len(line) for row in self._rows for line in row[number].split("\n")), default=0)
            widest = max(longest, len(name))
            total += min(widest, MIN_COLUMN_WIDTH) if column.endswith(("…", "~")) else widest
        return total

    def _table(self) -> "Table":
        from rich import box
        from rich.table import Table

        grid = Table(
            title=self._title,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for name in self._columns:
            may_shrink = name.endswith(("…", "~"))
            grid.add_column(
                name.rstrip("#…~"),
                justify="right" if name.endswith("#") else "left",
                no_wrap=not may_shrink,  # rich truncates the other columns first
                overflow="fold" if name.endswith("~") else "ellipsis",
                min_width=MIN_COLUMN_WIDTH if name.endswith("…") else None,
            )
        for row in self._rows:
            grid.add_row(*map(_colored, row))
        return grid

    def _blocks(self) -> "Iterator[RenderableType]":
        from rich.table import Table
        from rich.text import Text

        if self._title is not None:
            yield Text(self._title, style="bold")
        names = [column.rstrip("#…~") for column in self._columns]
        for row in self._rows:
            block = Table.grid(padding=(0, 2, 0, 0))
            block.add_column(no_wrap=True, style="bold", width=max(map(len, names)))
            block.add_column(overflow="fold")
            for name, cell in zip(names, row, strict=True):
                if cell.strip("·"):
                    block.add_row(name, _colored(cell))
            yield block
            yield Text("")


def table(title: str | None, *columns: str, rows: Iterable[Sequence[object]]) -> AdaptiveTable:
    """Return a table. The end of a column's name says its kind: `#` a number, `…` may be truncated, `~` may be wrapped."""
    return AdaptiveTable(title, columns, rows)


def _colored(cell: str) -> "Text":
    from rich.text import Text

    return Text(cell, style=COLOURS.get(cell, ""))


def printable(value: object) -> str:
    """Return the value as text with control characters escaped. Notes and error texts come from other users."""
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def format_duration(value: timedelta | None) -> str:
    """Format a duration in at most two units: `12s`, `3m 5s`, `2h 4m`, `9d 3h`."""
    if value is None:
        return ""
    seconds = int(value.total_seconds())
    if seconds < 0:
        return f"-{format_duration(-value)}"
    sizes = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    parts: list[str] = []
    for unit, size in sizes:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part) or "0s"


def format_instant(value: datetime | None) -> str:
    """Format an instant in UTC, to the second."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def format_relative(value: datetime | None, now: datetime) -> str:
    """Format an instant with its distance from `now`: `2026-03-01 09:00:00Z (in 3m 5s)`."""
    if value is None:
        return ""
    return f"{format_instant(value)} ({format_distance(value, now)})"


def format_distance(value: datetime | None, now: datetime) -> str:
    """Format the distance of an instant from `now`: `in 3m 5s`, `3m 5s ago`."""
    if value is None:
        return ""
    return f"in {format_duration(value - now)}" if value >= now else f"{format_duration(now - value)} ago"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, as in `1 job` or `1,200 jobs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
