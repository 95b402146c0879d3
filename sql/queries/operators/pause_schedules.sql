-- Pause up to $5 schedules. Returns how many were paused.
--   $1 handler    text
--   $2 owner      text
--   $3 name_like  text  a pattern of LIKE
--   $4 resume_at  timestamptz
--   $5 most       int4
--   $6 reason     text
--   -> changed int8?
select rota.pause_schedules($1, $2, $3, $4, $5, $6) as changed
