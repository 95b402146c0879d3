-- Delete a limit. Returns no row if there is none.
--   $1 key  text
--   -> removed bool?
-- index: limits_pkey (0012)
delete from rota.limits where limits.key = $1 returning true as removed
