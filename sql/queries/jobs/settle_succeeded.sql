-- Move the jobs whose attempts succeeded on node $1 into the ledger.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   $4 results_of    int8[]   fence tokens of those that returned something, and
--   $5 results       text[]   what, as JSON
--   -> fence_tokens int8[]?   what was written; of the others `examine_unsettled` tells why not
-- index: jobs_pkey (0002)
-- The ledger is written from what the fenced delete returned, so a job can't get there twice. The delete goes by the ctid
-- of the row locked above it: a row that changed between snapshot and lock is not deleted, and is settled next turn.
with attempt as materialized (
    select attempt.job_id, attempt.fence_token
    from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
    order by attempt.job_id
),
held as materialized (
    select job.row_id
    from attempt
    cross join lateral (
        select jobs.ctid as row_id
        from rota.jobs
        where jobs.job_id = attempt.job_id
          and jobs.fence_token = attempt.fence_token
          and jobs.leased_by = $1
        for update skip locked
    ) as job
),
ended as (
    delete from rota.jobs as job
    where job.ctid = any (array(select held.row_id from held))
    returning job.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, result
    )
    select
        ended.job_id, ended.schedule_id, ended.scheduled_for, ended.fence_token, ended.started_at, clock_timestamp(),
        ended.leased_by, ended.attempt, 'succeeded', ended.handler, ended.queue, ended.unique_key,
        ended.idempotency_key, ended.meta, returned.result::jsonb
    from ended
    left join unnest($4::int8[], $5::text[]) as returned (fence_token, result) on returned.fence_token = ended.fence_token
    returning job_runs.fence_token
)
select array_agg(recorded.fence_token) as fence_tokens
from recorded
