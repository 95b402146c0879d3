"""Read the files of JSON lines that daemons and handlers of the demo write."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines. Other lines are skipped; a missing file counts as empty."""
    values = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
