-- Move a batch of dead letters older than $1 to the ledger, with the outcome discarded.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_dead_letters_idx (0003)
with expired as materialized (
    select letter.job_id
    from rota.dead_letters as letter
    where letter.finished_at < now() - $1::interval
    order by letter.finished_at
    limit $2
    for update skip locked
),
deleted as (
    delete from rota.dead_letters as letter
    where letter.job_id = any (array(select expired.job_id from expired))
    returning letter.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, note
    )
    select
        deleted.job_id, deleted.schedule_id, deleted.scheduled_for, deleted.fence_token, deleted.started_at, clock_timestamp(),
        deleted.node, deleted.attempt, 'discarded', deleted.handler, deleted.queue, deleted.unique_key, deleted.idempotency_key,
        deleted.meta, 'discarded by rota: dead since ' || deleted.finished_at || ' (' || deleted.reason || '),
        past its retention'
    from deleted
    returning 1
)
select count(*) as pruned
from recorded
