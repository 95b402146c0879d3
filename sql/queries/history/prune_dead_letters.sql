-- Move a batch of dead letters older than $1 to the ledger, with the outcome discarded.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_dead_letters_idx (0003)
with expired_letters as materialized (
    select letter.job_id
    from rota.dead_letters as letter
    where letter.finished_at < now() - $1::interval
    order by letter.finished_at
    limit $2
    for update skip locked
),
deleted_letters as (
    delete from rota.dead_letters as letter
    where letter.job_id = any (array(select expired_letters.job_id from expired_letters))
    returning letter.*
),
ledger_rows as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, note
    )
    select
        letter.job_id, letter.schedule_id, letter.scheduled_for, letter.fence_token, letter.started_at, clock_timestamp(),
        letter.node, letter.attempt, 'discarded', letter.handler, letter.queue, letter.unique_key, letter.idempotency_key,
        letter.meta,
        'discarded by rota: dead since ' || letter.finished_at || ' (' || letter.reason || '), past its retention'
    from deleted_letters as letter
    returning 1
)
select count(*) as pruned
from ledger_rows
