-- Delete a batch of attempts older than $1.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_attempts_idx (0003)
with expired_attempts as materialized (
    select attempt.ctid as row_id
    from rota.attempts as attempt
    where attempt.finished_at < now() - $1::interval
    order by attempt.finished_at
    limit $2
    for update skip locked
),
deleted_attempts as (
    delete from rota.attempts as attempt
    where attempt.ctid = any (array(select expired_attempts.row_id from expired_attempts))
    returning 1
)
select count(*) as pruned
from deleted_attempts
