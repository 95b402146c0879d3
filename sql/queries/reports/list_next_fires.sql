-- List the schedules that fire next, the soonest first.
--   $1 limit  int8
--   -> name text?, handler text?, next_fire_at timestamptz?, timezone text?, jitter interval?, now timestamptz?
-- index: take_due_schedules_idx (0005)
select
    definition.name, definition.handler, clock.next_fire_at, definition.timezone, definition.jitter, now() as now
from (
    select clocks.schedule_id, clocks.next_fire_at
    from rota.schedule_clocks as clocks
    where clocks.next_fire_at > timestamptz '-infinity'
    order by clocks.next_fire_at, clocks.schedule_id
    limit $1
) as clock
cross join lateral (
    select *
    from rota.schedule_definitions
    where schedule_definitions.schedule_id = clock.schedule_id
    offset 0
) as definition
order by clock.next_fire_at, definition.name
