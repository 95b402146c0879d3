-- Read the declarations of an app's limits, and those of all limits with these keys.
--   $1 app   text
--   $2 keys  text[]
--   -> name text?, declared_by text?, declared text?
--   name  the key
-- index: limits_pkey (0012)
select limits.key as name, limits.declared_by, limits.declared::text as declared
from rota.limits
where limits.declared_by = $1
   or limits.key = any ($2::text[])
order by limits.key
