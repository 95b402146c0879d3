-- End dead letters that nobody has dealt with for longer than $1: into the ledger, as discarded.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_dead_letters_idx (0003)
with old as materialized (
    select letter.job_id
    from rota.dead_letters as letter
    where letter.finished_at < now() - $1::interval
    order by letter.finished_at
    limit $2
    for update skip locked
),
gone as (
    delete from rota.dead_letters as letter
    where letter.job_id = any (array(select old.job_id from old))
    returning letter.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, note
    )
    select
        gone.job_id, gone.schedule_id, gone.scheduled_for, gone.fence_token, gone.started_at, clock_timestamp(), gone.node,
        gone.attempt, 'discarded', gone.handler, gone.queue, gone.unique_key, gone.idempotency_key, gone.meta,
        'discarded by rota: dead since ' || gone.finished_at || ' (' || gone.reason || '), past its retention'
    from gone
    returning 1
)
select count(*) as pruned
from recorded
