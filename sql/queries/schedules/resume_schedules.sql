-- Resume paused schedules whose resume_at has passed. The trigger `replan` on rota.schedule_definitions then plans the next fire.
--   $1 schedule_ids  int8[]
--   -> resumed int8?
-- index: schedule_definitions_pkey, schedule_clocks_pkey (0005)
-- Lock the schedule_clocks row here too: the trigger updates it, and one locked row would otherwise make the whole batch wait.
with locked_schedules as materialized (
    select definition.schedule_id
    from unnest($1::int8[]) as due (schedule_id)
    cross join lateral (
        select schedule_definitions.schedule_id
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = due.schedule_id
          and schedule_definitions.paused
          and schedule_definitions.resume_at <= now()
        for update skip locked
    ) as definition
    cross join lateral (
        select clocks.schedule_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = definition.schedule_id
        for update skip locked
    ) as clock
),
resumed_schedules as (
    update rota.schedule_definitions as definition
    set paused = false
    where definition.schedule_id = any (array(select locked_schedules.schedule_id from locked_schedules))
    returning 1
)
select count(*) as resumed
from resumed_schedules
