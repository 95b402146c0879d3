-- Resume up to $5 paused schedules. Returns how many were resumed.
--   $1 handler       text
--   $2 owner         text
--   $3 name_like     text  a pattern of LIKE
--   $4 paused_since  timestamptz  only those paused since then; null: all
--   $5 most          int4
--   $6 reason        text
--   -> changed int8?
select rota.resume_schedules($1, $2, $3, $4, $5, $6) as changed
