-- Mark invalid schedules as not planned, so that they are planned again: a newer rota or newer zone data may accept them.
--   -> revived int8?
-- index: revive_invalid_schedules_idx (0005)
with locked_clocks as materialized (
    select clock.schedule_id
    from rota.schedule_clocks as clock
    where clock.invalid_reason is not null
      and clock.next_fire_at is null
    order by clock.schedule_id
    for update skip locked
),
revived_clocks as (
    update rota.schedule_clocks as clock
    set next_fire_at = timestamptz '-infinity',
        invalid_reason = null
    where clock.schedule_id = any (array(select locked_clocks.schedule_id from locked_clocks))
    returning 1
)
select count(*) as revived
from revived_clocks
