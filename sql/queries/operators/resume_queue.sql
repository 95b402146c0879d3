-- Let the jobs of a paused queue be claimed again.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.resume_queue($1, $2) as changed
