"""Let history go: ledger partitions by the day, the rest in small batches, each by an index."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.clock import boottime
from rota.db import queries
from rota.db.pool import Pool, connection
from rota.loop import rest

if TYPE_CHECKING:
    from rota.config import Retention
    from rota.telemetry import Telemetry

BATCH = 1000

PRUNED_EVERY = timedelta(seconds=60)

MORE_AFTER = timedelta(seconds=1)
"""The pause after a turn that left something: schedules that fire each second write more than a batch a minute."""

FOR_EVER = timedelta(0)


class Pruner:
    """Service: one batch of each kind a turn, so that no turn is long; what is left comes at the next, soon."""

    name = "pruner"
    interval: timedelta | None = PRUNED_EVERY

    def __init__(self, pool: Pool, telemetry: Telemetry, retention: Retention) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self._retention = retention

    async def run_once(self) -> None:
        """Prune once."""
        began = boottime()
        keep = self._retention
        kinds = {
            "attempts": keep.attempts,
            "fires": keep.fires,
            "dead_letters": keep.dead_letters,
            "guards": keep.guards,
        }
        left = False
        async with connection(self._pool) as db:
            _, dropped = await queries.rotate_ledger(db, keep=keep.job_runs or FOR_EVER)
            self._telemetry.pruned("job_runs", dropped)
            for what, age in kinds.items():
                if age is not None:
                    pruned = await queries.prune(db, what=what, keep=age, limit=BATCH)
                    self._telemetry.pruned(what, pruned)
                    left = left or pruned >= BATCH
            self._telemetry.pruned("nodes", await queries.prune_nodes(db))
        self.interval = rest(MORE_AFTER if left else PRUNED_EVERY, took=boottime() - began)
