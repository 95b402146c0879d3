"""Store schedules by the million, as clients do, and set their next fires directly. This preparation is not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.db import schedule_queries
from rota.lifecycle.scheduler import planner_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.bench.ground import Ground

PLANTED_AT_ONCE = 10_000

PAYLOAD_BYTES = 200

# Each fires once a year, so none becomes due by its expression while the bench runs.
PLANT = """
insert into rota.schedules (name, handler, cron, payload)
select 'schedule ' || number, $1, format('0 0 %s %s *', 1 + number % 25, 1 + number % 11),
    jsonb_build_object('fill', repeat('x', $4::int4 - 12))
from generate_series($2::int8, $3::int8) as number
"""
PLAN = """
update rota.schedule_clocks
set next_fire_at = date_trunc('year', now()) + interval '1 year' + schedule_id % 275 * interval '1 day'
where next_fire_at = '-infinity'
"""


async def plant(ground: Ground, tell: Callable[[int], None], *, first: int, last: int, handler: str) -> None:
    """Store the schedules number `first` to `last`, none of them due."""
    for start in range(first, last + 1, PLANTED_AT_ONCE):
        end = min(last, start + PLANTED_AT_ONCE - 1)
        await ground.db.execute(PLANT, handler, start, end, PAYLOAD_BYTES)
        await ground.db.execute(PLAN)
        tell(end - start + 1)
    # Mark the plans as current. Otherwise the daemons would first plan all schedules again.
    await schedule_queries.stamp_plans(ground.db, **planner_versions())
    await ground.db.execute("vacuum (analyze) rota.schedule_clocks")
    await ground.db.execute("vacuum (analyze) rota.schedule_definitions")
