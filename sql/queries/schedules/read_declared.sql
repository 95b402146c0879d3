-- Read the declarations of an app's schedules, and those of all schedules with these names.
--   $1 app    text
--   $2 names  text[]
--   -> name text?, declared_by text?, declared text?
select schedule.name, schedule.declared_by, schedule.declared::text as declared
from rota.schedules as schedule
where schedule.declared_by = $1
   or schedule.name = any ($2::text[])
order by schedule.name
