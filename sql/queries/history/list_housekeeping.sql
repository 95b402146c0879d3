-- List the pieces of housekeeping that are not in order: failed at their last run, or without a success for longer than $1.
--   $1 patience  interval
--   -> piece text, succeeded_at timestamptz, error text?, age interval?
select
    known.piece, known.succeeded_at, known.error, now() - known.succeeded_at as age
from rota.housekeeping as known
where known.error is not null
   or known.succeeded_at < now() - $1::interval
order by known.piece
