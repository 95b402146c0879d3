-- Pause a queue (*: all queues): its jobs are not claimed.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.pause_queue($1, $2) as changed
