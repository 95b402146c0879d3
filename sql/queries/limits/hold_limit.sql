-- Hold a key until an instant, or for some time from now. Without both, end its hold.
--   $1 key     text
--   $2 until   timestamptz
--   $3 length  interval
--   $4 reason  text
--   -> until timestamptz?
select held.until
from (select coalesce($2::timestamptz, now() + $3::interval) as until) as held
cross join lateral rota.hold_limit($1, held.until, $4)
