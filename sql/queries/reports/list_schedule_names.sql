-- List the names of schedules in alphabetical order.
--   $1 limit  int8
--   -> name text?
-- index: schedule_definitions_name_key (0005)
select schedule.name
from rota.schedules as schedule
order by schedule.name
limit $1
