"""Write the schedules and limits that an app declares to the database. `domain.declaration` decides what to do with each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

from rota.db import limit_queries, operations, schedule_queries
from rota.db.salvage import salvage
from rota.domain.declaration import reconcile
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rota.db.pool import Connection
    from rota.domain.declaration import Declaration, Step, StoredSchedule

MAX_TURNS = 5
"""How often to try when another session changes or locks the same rows."""

RETRY_PAUSE_SECONDS = 0.5
"""Pause between turns: another daemon that starts with the same declarations has usually finished by then."""

BATCH_SIZE = 500
"""Most schedules or limits in one statement."""

LOCK_TIMEOUT = "100ms"
"""How long an insert waits for another session that has inserted the same name in an open transaction."""

LOCKED_SECONDS = 3.0
"""Stop trying to write schedules that others keep locked after this time, because a daemon starts its services afterwards."""

LOCKED = "another session keeps it locked, or keeps changing it: sync again"


class Kind(NamedTuple):
    """A kind of declarations, and the functions that read, write and remove its rows."""

    read: Callable[..., Awaitable[list[StoredSchedule]]]
    write: Callable[..., Awaitable[set[str]]]
    remove: Callable[..., Awaitable[Any]]


SCHEDULES = Kind(
    schedule_queries.read_declared,
    schedule_queries.apply_declarations,
    lambda db, name: operations.remove_schedule(db, name=name, reason="no longer declared by the code"),
)

LIMITS = Kind(limit_queries.read_declared_limits, limit_queries.apply_limit_declarations, limit_queries.remove_limit)


async def apply(
    db: Connection,
    kind: Kind = SCHEDULES,
    /,
    *,
    app: str,
    release: str | None,
    declarations: Mapping[str, Declaration],
    force: bool = False,
    prune: bool = False,
    dry_run: bool = False,
) -> list[Step]:
    """Write the declarations; return a step for each, and for each row no longer declared. `dry_run` writes nothing.

    A declaration that the server rejects, or whose row stays locked, is returned as a step with what="refused". The other
    declarations are still written.
    """
    done: dict[str, Step] = {}
    steps: list[Step] = []
    deadline = boottime() + LOCKED_SECONDS
    for turn in range(MAX_TURNS):
        if turn:
            await asyncio.sleep(RETRY_PAUSE_SECONDS)
        stored = await kind.read(db, app=app, names=list(declarations))
        new_steps = reconcile(declarations.values(), stored, app=app, release=release, force=force)
        steps_to_write = [step for step in new_steps if step.writes and step.name not in done and not dry_run]
        for first in range(0, len(steps_to_write), BATCH_SIZE):
            done |= await _write(db, kind, app, steps_to_write[first : first + BATCH_SIZE], deadline)
        unwritten = {step.name for step in steps_to_write if step.name not in done}
        # A row written in an earlier turn now compares as unchanged, so report the step of that earlier turn.
        steps = [
            replace(step, what="refused", why=LOCKED) if step.name in unwritten else done.get(step.name, step)
            for step in new_steps
        ]
        if not unwritten or boottime() > deadline:
            break
    if prune and not dry_run:
        for step in steps:
            if step.what == "undeclared":
                await kind.remove(db, step.name)
    return steps


async def _write(db: Connection, kind: Kind, app: str, batch: list[Step], deadline: float) -> dict[str, Step]:
    """Write the batch; return a step for each declaration that was written, or that the server rejected."""

    async def write(batch_part: Sequence[Step]) -> dict[str, Step]:
        try:
            async with db.transaction():
                await db.execute(f"set local lock_timeout = '{LOCK_TIMEOUT}'")
                written = await kind.write(db, app=app, steps=batch_part)
        except asyncpg.LockNotAvailableError:
            middle = len(batch_part) // 2
            if not middle or boottime() > deadline:
                return {}
            return await write(batch_part[:middle]) | await write(batch_part[middle:])
        return {step.name: step for step in batch_part if step.name in written}

    async def refuse(step: Step, error: Exception) -> dict[str, Step]:
        why = getattr(error, "constraint_name", None) or str(error.args[0] if error.args else type(error).__name__)
        return {step.name: replace(step, what="refused", why=why)}

    return {name: step for steps in await salvage(batch, write, refuse) for name, step in steps.items()}
