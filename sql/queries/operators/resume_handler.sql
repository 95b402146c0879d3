-- Resume a paused handler.
--   $1 name    text
--   $2 reason  text
--   -> changed bool
select rota.resume_handler($1, $2) as changed
