-- Hold limits: no job of these keys starts until then. A hold that ends later stays.
--   $1 keys     text[]
--   $2 lengths  interval[]     length of each hold,
--   $3 ends     timestamptz[]  or its end
--   -> held int8?
select count(*) as held
from unnest($1::text[], $2::interval[], $3::timestamptz[]) as hold (key, length, until)
cross join lateral rota.extend_hold(key => hold.key, until => coalesce(hold.until, clock_timestamp() + hold.length)) as extended
