-- Delete a limit.
--   $1 key  text
--   -> remove_limit bool?  whether it existed
select rota.remove_limit($1)
