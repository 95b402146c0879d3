"""Insert schedules, set their clocks, run schedulers once, and read the fires."""

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
"""Due once a year, for schedules that must not fire during the test."""


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
    """Set the schedule's clock as if its next instant were `ago` in the past and undecided; return the instant."""
    return await conn.fetchval(  # type: ignore[no-any-return]
        """
        update rota.schedule_clocks set next_fire_at = now() - $2::interval, last_fire_at = null
        where schedule_id = $1
        returning next_fire_at
        """,
        schedule_id,
        ago,
    )


async def read_clock(conn: Connection[Record], schedule_id: int) -> Record:
    """Return the schedule's clock; next_fire_at is NULL if it must be planned."""
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


async def read_fires(conn: Connection[Record], schedule_id: int | None = None) -> list[tuple[str, datetime]]:
    """Return the disposition and instant of each fire, in the order of the instants."""
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


async def read_dispositions(conn: Connection[Record], schedule_id: int | None = None) -> list[str]:
    """Return the disposition of each fire, in the order of the instants."""
    return [disposition for disposition, _ in await read_fires(conn, schedule_id)]


async def end_live_jobs(conn: Connection[Record]) -> None:
    """Delete every live job, which the scheduler treats as success."""
    await conn.execute("delete from rota.jobs")


def recording_telemetry(events: list[tuple[str, Mapping[str, Any]]] | None = None) -> Telemetry:
    """Return telemetry that logs nothing and appends its events to `events`."""
    collected = [] if events is None else events
    log = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(50))
    return Telemetry(log, watch=lambda event, fields: collected.append((event, fields)))


@dataclass(slots=True)
class Planner:
    """The scheduler of one node, which covers all shards by default, and its logged events."""

    pool: asyncpg.Pool[Record]
    shards: Sequence[int] | None = EVERY_SHARD
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    _scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler."""
        if self._scheduler is None:
            self._scheduler = Scheduler(
                self.pool,
                Wake(),
                recording_telemetry(self.events),
                node=NodeId(uuid4()),
                shards=lambda: self.shards,
                poll_interval=timedelta(seconds=1),
            )
        return self._scheduler

    async def turn(self) -> float:
        """Make the scheduler check every schedule once and decide."""
        self.scheduler._sweep_at = 0.0
        return await self.scheduler.turn()

    def events_named(self, event: str) -> list[Mapping[str, Any]]:
        """Return the fields of every logged event with that name."""
        return [fields for name, fields in self.events if name == event]


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> datetime:
    """Return an instant in UTC."""
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
