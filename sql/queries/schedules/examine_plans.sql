-- Return whether all next fires were computed by this version of rota with this version of the zone data.
--   $1 rota_version  text
--   $2 tzdata        text
--   -> is_current bool?
select meta.planned_with is not distinct from format('rota %s, tzdata %s', $1::text, $2::text) as is_current
from rota.meta
