"""Put schedules and their clocks into any state, let planners decide, and say what became of which instant."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import structlog

from rota.domain.job import NodeId
from rota.domain.shards import EVERY_SHARD
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.wake import Wake
from rota.observability.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import asyncpg
    from asyncpg import Connection, Record

    from servers import Database

NEVER = "0 0 1 1 *"
"""Due once a year: what a test doesn't want to fire by itself."""


async def make_schedule(conn: Connection[Record], name: str = "s", **columns: Any) -> int:
    """Insert a schedule, by default one that fires on the first of January."""
    columns = {"name": name, "handler": "h", **columns}
    if "every" not in columns:
        columns.setdefault("cron", NEVER)
    places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
    return int(
        await conn.fetchval(
            f"insert into rota.schedules ({', '.join(columns)}) values ({places}) returning schedule_id",
            *columns.values(),
        )
    )


async def make_due(conn: Connection[Record], schedule_id: int, *, ago: timedelta = timedelta(0)) -> datetime:
    """Set its clock as if its next instant had come that long ago, nobody has looked since; return the instant."""
    return await conn.fetchval(  # type: ignore[no-any-return]
        """
        update rota.schedule_clocks set next_fire_at = now() - $2::interval, last_fire_at = null
        where schedule_id = $1
        returning next_fire_at
        """,
        schedule_id,
        ago,
    )


async def clock(conn: Connection[Record], schedule_id: int) -> Record:
    """Its clock, with next_fire_at NULL where it is to be planned."""
    row = await conn.fetchrow(
        """
        select next_fire_at = '-infinity' as unplanned, nullif(next_fire_at, '-infinity') as next_fire_at, last_fire_at,
            version, last_success_at, consecutive_failures, invalid_reason
        from rota.schedule_clocks where schedule_id = $1
        """,
        schedule_id,
    )
    assert row is not None
    return row


async def fires(conn: Connection[Record], schedule_id: int | None = None) -> list[tuple[str, datetime]]:
    """What became of its instants, in their order."""
    return [
        (row["disposition"], row["scheduled_for"])
        for row in await conn.fetch(
            """
            select disposition, scheduled_for from rota.fires
            where schedule_id = coalesce($1, schedule_id) order by scheduled_for
            """,
            schedule_id,
        )
    ]


async def dispositions(conn: Connection[Record], schedule_id: int | None = None) -> list[str]:
    """The same without the instants."""
    return [disposition for disposition, _ in await fires(conn, schedule_id)]


async def end_live_jobs(conn: Connection[Record]) -> None:
    """As if every live job had succeeded."""
    await conn.execute("delete from rota.jobs")


def quiet_telemetry(events: list[tuple[str, Mapping[str, Any]]] | None = None) -> Telemetry:
    """Return telemetry that logs nothing and appends its events to `events`."""
    collected = [] if events is None else events
    log = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(50))
    return Telemetry(log, watch=lambda event, fields: collected.append((event, fields)))


@dataclass(slots=True)
class Planner:
    """One node's scheduler, told to look at all schedules, and what it said."""

    pool: asyncpg.Pool[Record]
    shards: Sequence[int] | None = EVERY_SHARD
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    _scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler itself."""
        if self._scheduler is None:
            self._scheduler = Scheduler(
                self.pool,
                Wake(),
                quiet_telemetry(self.events),
                node=NodeId(uuid4()),
                shards=lambda: self.shards,
                poll_interval=timedelta(seconds=1),
            )
        return self._scheduler

    async def turn(self) -> float:
        """Let it look at everything once, and decide."""
        self.scheduler._sweep_at = 0.0
        return await self.scheduler.turn()

    def said(self, event: str) -> list[Mapping[str, Any]]:
        """What it told under that name."""
        return [fields for name, fields in self.events if name == event]


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> datetime:
    """An instant in UTC."""
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC)


@asynccontextmanager
async def open_transaction(database: Database, statement: str) -> AsyncIterator[Connection[Record]]:
    """Execute a statement in a transaction that stays open until the block ends."""
    async with database.connect() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(statement)
        yield other
        await transaction.rollback()
