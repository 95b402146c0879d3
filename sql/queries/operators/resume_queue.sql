-- Resume a paused queue.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.resume_queue($1, $2) as changed
