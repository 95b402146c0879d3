-- Pause a handler: its jobs are not claimed.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.pause_handler($1, $2) as changed
