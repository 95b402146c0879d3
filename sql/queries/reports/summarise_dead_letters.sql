-- Count dead letters by handler, queue, reason and kind of error, the largest group first. A null filter matches everything.
--   $1 handler     text
--   $2 queue       text
--   $3 reason      text
--   $4 error_kind  text
--   $5 before      timestamptz  only those that died before
--   $6 limit       int8  number of groups to return; null: all
--   -> handler text, queue text, reason text, error_kind text?, letters int8?, at_most_once int8?, oldest timestamptz?, newest timestamptz?, sample int8?, now timestamptz?, total int8?
--   total  number of groups without the limit
select
    letter.handler, letter.queue, letter.reason, letter.error_kind,
    count(*) as letters,
    count(*) filter (where letter.delivery = 'at_most_once') as at_most_once,
    min(letter.finished_at) as oldest,
    max(letter.finished_at) as newest,
    max(letter.job_id) as sample,
    now() as now,
    count(*) over () as total
from rota.dead_letters as letter
where ($1::text is null or letter.handler = $1)
  and ($2::text is null or letter.queue = $2)
  and ($3::text is null or letter.reason = $3)
  and ($4::text is null or letter.error_kind = $4)
  and ($5::timestamptz is null or letter.finished_at < $5)
group by letter.handler, letter.queue, letter.reason, letter.error_kind
order by letters desc, letter.handler, letter.reason
limit $6::int8
