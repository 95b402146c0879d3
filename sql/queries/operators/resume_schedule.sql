-- Resume a schedule. Returns whether it was paused.
--   $1 name    text
--   $2 reason  text
--   -> changed bool?
select rota.resume_schedule($1, $2) as changed
