-- Forget attempts older than $1, a batch at a time.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_attempts_idx (0003)
with old as materialized (
    select attempt.job_id, attempt.fence_token
    from rota.attempts as attempt
    where attempt.finished_at < now() - $1::interval
    order by attempt.finished_at
    limit $2
    for update skip locked
),
gone as (
    delete from rota.attempts as attempt
    using old
    where attempt.job_id = old.job_id
      and attempt.fence_token = old.fence_token
    returning 1
)
select count(*) as pruned
from gone
