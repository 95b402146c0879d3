-- Count the schedules without jitter that fire at the same instant.
--   $1 at        timestamptz
--   $2 cron      text  schedules that are not planned yet count if they have this expression
--   $3 timezone  text  and this zone
--   -> schedules int8?
-- index: take_due_schedules_idx, schedule_definitions_pkey (0005)
select count(*) as schedules
from rota.schedule_clocks as clock
join rota.schedule_definitions as definition on definition.schedule_id = clock.schedule_id
where clock.next_fire_at in ($1, timestamptz '-infinity')
  and definition.jitter = interval '0'
  and (clock.next_fire_at = $1 or definition.cron = $2 and definition.timezone = $3)
