-- Cancel live jobs of a handler, a queue or both, in one bounded batch: those that wait at once, those that run are asked.
--   $1 handler  text
--   $2 queue    text
--   $3 before   timestamptz
--   $4 most     int4
--   $5 note     text
--   -> cancelled int8, requested int8
select went.cancelled, went.requested
from rota.cancel_many($1, $2, $3, $4, $5) as went
