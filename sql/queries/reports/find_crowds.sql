-- Find the next instants at which more than $1 schedules without jitter fire.
--   $1 more_than  int8
--   -> next_fire_at timestamptz?, cron text?, schedules int8?, sample text?
--   next_fire_at  null: the schedules are not planned yet; they are grouped by expression and zone
--   sample        the first of their names
select
    schedule.next_fire_at, min(schedule.cron) as cron, count(*) as schedules, min(schedule.name) as sample
from (
    select
        nullif(clock.next_fire_at, timestamptz '-infinity') as next_fire_at,
        case when clock.next_fire_at = timestamptz '-infinity' then definition.timezone end as unplanned,
        definition.cron, definition.name
    from rota.schedule_clocks as clock
    join rota.schedule_definitions as definition on definition.schedule_id = clock.schedule_id
    where clock.next_fire_at is not null
      and definition.jitter = interval '0'
      and (clock.next_fire_at > timestamptz '-infinity' or definition.cron is not null)
) as schedule
group by schedule.next_fire_at, schedule.unplanned, case when schedule.unplanned is not null then schedule.cron end
having count(*) > $1
order by schedule.next_fire_at nulls last, sample
limit 10
