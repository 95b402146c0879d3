"""Store many schedules by plain SQL, and set their next fires directly. This preparation is not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.db import schedule_queries
from rota.lifecycle.scheduler import planner_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.bench.database import BenchDatabase

SCHEDULES_PER_STATEMENT = 10_000

PAYLOAD_BYTES = 200

# Each fires once a year, so none becomes due by its expression while the bench runs.
INSERT_SCHEDULES = """
insert into rota.schedules (name, handler, cron, payload)
select 'schedule ' || number, $1, format('0 0 %s %s *', 1 + number % 25, 1 + number % 11),
    jsonb_build_object('fill', repeat('x', $4::int4 - 12))
from generate_series($2::int8, $3::int8) as number
"""
SET_NEXT_FIRES = """
update rota.schedule_clocks
set next_fire_at = date_trunc('year', now()) + interval '1 year' + schedule_id % 275 * interval '1 day'
where next_fire_at = '-infinity'
"""


async def store_schedules(
    database: BenchDatabase, advance: Callable[[int], None], *, first: int, last: int, handler: str
) -> None:
    """Store the schedules with the numbers `first` to `last`. None of them is due."""
    for start in range(first, last + 1, SCHEDULES_PER_STATEMENT):
        end = min(last, start + SCHEDULES_PER_STATEMENT - 1)
        await database.connection.execute(INSERT_SCHEDULES, handler, start, end, PAYLOAD_BYTES)
        await database.connection.execute(SET_NEXT_FIRES)
        advance(end - start + 1)
    # Mark the plans as current. Otherwise the daemons would first plan all schedules again.
    await schedule_queries.stamp_plans(database.connection, **planner_versions())
    await database.connection.execute("vacuum (analyze) rota.schedule_clocks")
    await database.connection.execute("vacuum (analyze) rota.schedule_definitions")
