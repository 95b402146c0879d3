-- List dead letters, oldest job first, which is the order of redriving. A null filter matches everything.
--   $1 handler     text
--   $2 queue       text
--   $3 reason      text
--   $4 error_kind  text
--   $5 before      timestamptz  only those that died before
--   $6 limit       int8
--   -> job_id int8, handler text, queue text, reason text, error_kind text?, attempt int4, max_attempts int4?, delivery text?, created_by text, started_at timestamptz?, finished_at timestamptz, now timestamptz?
-- index: dead_letters_pkey (0003)
select
    letter.job_id, letter.handler, letter.queue, letter.reason, letter.error_kind, letter.attempt, letter.max_attempts,
    letter.delivery, letter.created_by, letter.started_at, letter.finished_at, now() as now
from rota.dead_letters as letter
where ($1::text is null or letter.handler = $1)
  and ($2::text is null or letter.queue = $2)
  and ($3::text is null or letter.reason = $3)
  and ($4::text is null or letter.error_kind = $4)
  and ($5::timestamptz is null or letter.finished_at < $5)
order by letter.job_id
limit $6
