"""Delete expired history: ledger partitions by the day, the rest in small batches, each by an index."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from rota.db import queries
from rota.db.pool import Connection, Pool, connection
from rota.db.salvage import TRANSIENT
from rota.runtime.clock import boottime
from rota.supervision.loop import throttled_interval

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rota.config import Retention
    from rota.observability.telemetry import Telemetry

BATCH = 1000

PRUNE_INTERVAL = timedelta(seconds=60)

FULL_BATCH_PAUSE = timedelta(seconds=1)
"""Pause after a turn that filled a batch: schedules that fire each second write more than a batch a minute."""

FOREVER = timedelta(0)

LIMIT_STARTS_MARGIN = timedelta(minutes=1)
"""How long starts of limits are kept after they have stopped to count."""

TABLE_ERRORS = (
    asyncpg.UndefinedTableError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ObjectNotInPrerequisiteStateError,
)
"""Transient errors that concern only one table. The next piece may succeed, because it works on another table."""


class Pruner:
    """Service: deletes one batch of each kind per turn. The next turn follows soon if a batch was full."""

    name = "pruner"
    interval: timedelta | None = PRUNE_INTERVAL

    def __init__(self, pool: Pool, telemetry: Telemetry, retention: Retention) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self._retention = retention
        self._has_more = False
        """Whether a batch of this turn was full."""

    async def run_once(self) -> None:
        """Delete one batch of each kind. If the database refuses one, record its error and continue with the others."""
        began = boottime()
        self._has_more = False
        errors: dict[str, str | None] = {}
        async with connection(self._pool) as db:
            # This statement creates and drops partitions, and records the success or failure of both itself.
            await self._rotate_ledger(db)
            for piece, work in self._pieces().items():
                try:
                    await work(db)
                except asyncpg.PostgresError as error:
                    if isinstance(error, TRANSIENT) and not isinstance(error, TABLE_ERRORS):
                        raise
                    errors[piece] = f"{type(error).__name__}: {error.args[0] if error.args else ''}"
                else:
                    errors[piece] = None
            self._telemetry.housekeeping_failed(await queries.record_housekeeping(db, errors))
        self.interval = throttled_interval(
            FULL_BATCH_PAUSE if self._has_more else PRUNE_INTERVAL, took=boottime() - began
        )

    def _pieces(self) -> dict[str, Callable[[Connection], Awaitable[None]]]:
        keep = self._retention
        kinds = {
            "attempts": keep.attempts,
            "fires": keep.fires,
            "dead_letters": keep.dead_letters,
            "guards": keep.guards,
            "audit": keep.audit,
            "limit_starts": LIMIT_STARTS_MARGIN,
        }
        return {**{kind: partial(self._prune, kind, age) for kind, age in kinds.items()}, "nodes": self._prune_nodes}

    async def _rotate_ledger(self, db: Connection) -> None:
        _, dropped = await queries.rotate_ledger(db, keep=self._retention.job_runs or FOREVER)
        self._telemetry.pruned("job_runs", dropped)

    async def _prune(self, kind: str, keep: timedelta | None, db: Connection) -> None:
        if keep is not None:
            pruned = await queries.prune(db, what=kind, keep=keep, limit=BATCH)
            self._telemetry.pruned(kind, pruned)
            self._has_more = self._has_more or pruned >= BATCH

    async def _prune_nodes(self, db: Connection) -> None:
        self._telemetry.pruned("nodes", await queries.prune_nodes(db))
