-- Find schedules whose future instants are already decided, because the server's clock was ahead and was set back.
--   $1 limit  int8
--   -> name text, decided_up_to timestamptz?
select definition.name, clock.last_fire_at as decided_up_to
from rota.schedule_clocks as clock
join rota.schedule_definitions as definition on definition.schedule_id = clock.schedule_id
where clock.last_fire_at > now() + interval '5 seconds'
order by clock.last_fire_at desc, definition.name
limit $1
