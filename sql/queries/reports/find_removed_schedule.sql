-- Find the schedule_id of a removed schedule by the name it had at its last fire.
--   $1 name  text
--   $2 most  int8  number of the latest fires of all schedules to search
--   -> schedule_id int8?
-- index: fires_pkey (0005)
select recent.schedule_id
from (
    select fire.schedule_id, fire.name, fire.scheduled_for
    from rota.fire_history as fire
    order by fire.scheduled_for desc, fire.schedule_id desc
    limit $2
) as recent
where recent.name = $1
order by recent.scheduled_for desc
limit 1
