-- List the housekeeping tasks whose last run failed, or whose last success is older than $1.
--   $1 patience  interval
--   -> piece text, succeeded_at timestamptz, error text?, age interval?
select
    housekeeping.piece, housekeeping.succeeded_at, housekeeping.error, now() - housekeeping.succeeded_at as age
from rota.housekeeping
where housekeeping.error is not null
   or housekeeping.succeeded_at < now() - $1::interval
order by housekeeping.piece
