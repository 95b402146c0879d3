-- Enqueue jobs for past instants of a schedule that have no job.
--   $1 name      text
--   $2 instants  timestamptz[]
--   $3 run_at    timestamptz[]  when each is due
--   $4 reason    text
--   -> enqueued int8?, left_out int8?, undecided int8?
select counts.enqueued, counts.left_out, counts.undecided
from rota.backfill_schedule($1, $2, $3, $4) as counts
