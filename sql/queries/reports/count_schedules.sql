-- Count the running and the paused schedules that a filter selects, to show what pausing or resuming them would change.
--   $1 handler       text
--   $2 owner         text
--   $3 name_like     text  a pattern of LIKE
--   $4 paused_since  timestamptz  count as paused only those paused since then; null: all
--   -> running int8, paused int8
select
    count(*) filter (where not definition.paused) as running,
    count(*) filter (where definition.paused and ($4::timestamptz is null or definition.paused_at >= $4)) as paused
from rota.schedules as definition
where ($1::text is null or definition.handler = $1)
  and ($2::text is null or definition.owner = $2)
  and ($3::text is null or definition.name like $3)
