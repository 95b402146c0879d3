"""Queries about limits: the rows of rota.limits, and what their keys run and wait for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rota.db.sql import SQL
from rota.domain.declaration import StoredSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.pool import Connection
    from rota.domain.declaration import Step


async def read_declared_limits(db: Connection, *, app: str, names: Sequence[str]) -> list[StoredSchedule]:
    """Return the limits that the app has declared, and all limits with these keys."""
    return [StoredSchedule(**row) for row in await db.fetch(SQL["read_declared_limits"], app, names)]


async def apply_limit_declarations(db: Connection, *, app: str, steps: Sequence[Step]) -> set[str]:
    """Carry out the inserts and edits; return the keys of the limits written. The others have changed since they were read."""
    inserts = [{"columns": step.columns, "declared": step.declared} for step in steps if step.what == "inserted"]
    edits = [
        {"name": step.name, "expected": step.expected, "columns": step.columns, "declared": step.declared}
        for step in steps
        if step.writes and step.what != "inserted"
    ]
    rows = await db.fetch(SQL["apply_limit_declarations"], app, json.dumps(inserts), json.dumps(edits))
    return {row[0] for row in rows}


async def remove_limit(db: Connection, key: str) -> bool:
    """Delete a limit; return whether it existed."""
    return bool(await db.fetchval(SQL["remove_limit"], key))
