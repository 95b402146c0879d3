"""How things look: tables for people, JSON for programs."""

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

WIDE = 160
"""Columns where nobody looks: a pipe, a file."""

LISTED = 100
"""Most rows of a list without a --limit."""

LEGIBLE = 6
"""Characters that a column which may be cut or broken into lines gets at least."""

SPACE_BETWEEN = 3
"""Characters between two columns."""

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


class Rows:
    """A table, or one block of `column  value` lines for each row where the terminal is too narrow for all columns."""

    def __init__(self, title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._title = title
        self._columns = columns
        self._rows = [[printable(cell) for cell in row] for row in rows]

    def __rich_console__(self, _: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        """Yield what rich prints."""
        if self._narrowest <= options.max_width:
            yield self._table()
        else:
            yield from self._blocks()

    @property
    def _narrowest(self) -> int:
        """The width in which every column is legible; cells that are not broken or cut need their full width."""
        total = (len(self._columns) - 1) * SPACE_BETWEEN
        for number, column in enumerate(self._columns):
            name = column.rstrip("#…~")
            longest = max((len(line) for row in self._rows for line in row[number].split("\n")), default=0)
            widest = max(longest, len(name))
            total += min(widest, LEGIBLE) if column.endswith(("…", "~")) else widest
        return total

    def _table(self) -> "Table":
        from rich import box
        from rich.table import Table

        laid = Table(
            title=self._title,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for name in self._columns:
            gives = name.endswith(("…", "~"))
            laid.add_column(
                name.rstrip("#…~"),
                justify="right" if name.endswith("#") else "left",
                no_wrap=not gives,  # of what doesn't fit, the others are cut first
                overflow="fold" if name.endswith("~") else "ellipsis",
                min_width=LEGIBLE if name.endswith("…") else None,
            )
        for row in self._rows:
            laid.add_row(*map(_coloured, row))
        return laid

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
                    block.add_row(name, _coloured(cell))
            yield block
            yield Text("")


def table(title: str | None, *columns: str, rows: Iterable[Sequence[object]]) -> Rows:
    """Lay out a table. A column whose name ends in `#` holds numbers. Where it is narrow, `…` may be cut, `~` broken into lines."""
    return Rows(title, columns, rows)


def _coloured(cell: str) -> "Text":
    from rich.text import Text

    return Text(cell, style=COLOURS.get(cell, ""))


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
