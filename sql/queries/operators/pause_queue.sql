-- Keep the jobs of a queue (*: of all) from being claimed.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.pause_queue($1, $2) as changed
