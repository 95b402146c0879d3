-- Enqueue jobs for past instants of a schedule that did not run.
--   $1 name      text
--   $2 instants  timestamptz[]
--   $3 run_at    timestamptz[]  when each is due
--   $4 reason    text
--   -> enqueued int8?, left_out int8?, undecided int8?
select done.enqueued, done.left_out, done.undecided
from rota.backfill_schedule($1, $2, $3, $4) as done
