-- Move jobs whose attempts succeeded on node $1 into the ledger (rota.job_runs).
-- A job is moved only if node $1 still has the claim with this fence token.
-- Jobs that another transaction has locked are skipped: examine_unsettled then finds out why.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   $4 results_of    int8[]   fence tokens of the attempts that have a result, and
--   $5 results       text[]   those results, as JSON
--   -> fence_tokens int8[]?   tokens of the jobs that were moved
-- index: jobs_pkey (0002)
-- The ledger rows come from what the delete returned, so a job can't be written twice. The delete goes by the ctid of the locked
-- row: a row that changed between snapshot and lock is not deleted, and the next call settles it.
with attempt as materialized (
    select attempt.job_id, attempt.fence_token
    from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
    order by attempt.job_id
),
locked as materialized (
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
deleted as (
    delete from rota.jobs as job
    where job.ctid = any (array(select locked.row_id from locked))
    returning job.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, result
    )
    select
        deleted.job_id, deleted.schedule_id, deleted.scheduled_for, deleted.fence_token, deleted.started_at, clock_timestamp(),
        deleted.leased_by, deleted.attempt, 'succeeded', deleted.handler, deleted.queue, deleted.unique_key,
        deleted.idempotency_key, deleted.meta, returned.result::jsonb
    from deleted
    left join unnest($4::int8[], $5::text[]) as returned (fence_token, result) on returned.fence_token = deleted.fence_token
    returning job_runs.fence_token
)
select array_agg(recorded.fence_token) as fence_tokens
from recorded
