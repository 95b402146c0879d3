-- Tell whether all next fires were found by this rota with this zone data.
--   $1 rota_version  text
--   $2 tzdata        text
--   -> ours bool?
select meta.planned_with is not distinct from format('rota %s, tzdata %s', $1::text, $2::text) as ours
from rota.meta
