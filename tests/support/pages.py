"""Read the documentation: pages, code blocks and tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Block(NamedTuple):
    """One code block of a page."""

    heading: str
    language: str
    text: str


def page(name: str) -> str:
    """Return the text of `README` or of a page of docs/."""
    return (ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md").read_text("utf-8")


def pages() -> dict[str, str]:
    """Return the text of every page by name, the README included."""
    return {name: page(name) for name in ("README", *sorted(file.stem for file in (ROOT / "docs").glob("*.md")))}


def blocks(text: str, heading: str | None = None, language: str | None = None) -> list[Block]:
    """Return the code blocks of a page in order, optionally only those below `heading` or in `language`."""
    found, current = [], ""
    for part in re.finditer(
        r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w*)\n(?P<text>.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        if part["heading"] is not None:
            current = part["heading"]
        elif heading in {None, current} and language in {None, part["language"]}:
            found.append(Block(current, part["language"], part["text"]))
    return found


def table(text: str, first_column: str) -> list[list[str]]:
    """Return the rows of the table whose first column has that name."""
    start = text.index(f"| {first_column} |")
    lines = text[start:].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
