-- Cancel up to $4 live jobs of a handler, a queue or both. Running jobs get a request to cancel.
--   $1 handler  text
--   $2 queue    text
--   $3 before   timestamptz
--   $4 most     int4
--   $5 note     text
--   -> cancelled int8, requested int8
select counts.cancelled, counts.requested
from rota.cancel_many($1, $2, $3, $4, $5) as counts
