-- Find instants that come next and that many schedules share, none of which has any jitter.
--   $1 more_than  int8
--   -> next_fire_at timestamptz?, cron text?, schedules int8?, sample text?
-- Those that no daemon has planned yet have no next_fire_at: they are alike by expression and zone.
select
    alike.next_fire_at, min(alike.cron) as cron, count(*) as schedules, min(alike.name) as sample
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
) as alike
group by alike.next_fire_at, alike.unplanned, case when alike.unplanned is not null then alike.cron end
having count(*) > $1
order by alike.next_fire_at nulls last, sample
limit 10
