-- Resume paused schedules, in one bounded batch; return how many were resumed by it.
--   $1 handler       text
--   $2 owner         text
--   $3 name_like     text  a pattern of LIKE
--   $4 paused_since  timestamptz
--   $5 most          int4
--   $6 reason        text
--   -> changed int8?
select rota.resume_schedules($1, $2, $3, $4, $5, $6) as changed
