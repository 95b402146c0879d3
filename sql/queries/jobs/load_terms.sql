-- Read the retry settings of node $1's attempts that did not succeed.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   -> job_id int8, fence_token int8, leased_by uuid, handler text, queue text, attempt int4, max_attempts int4?, losses int4, releases int4, delivery text?, backoff_base interval?, backoff_cap interval?, retry_left interval?, retry_until timestamptz?, schedule_id int8?
-- index: jobs_pkey (0002)
select
    job.job_id, job.fence_token, job.leased_by, job.handler, job.queue, job.attempt, job.max_attempts, job.losses,
    job.releases, job.delivery, rota.bounded_duration(job.backoff_base) as backoff_base,
    rota.bounded_duration(job.backoff_cap) as backoff_cap, deadline.retry_until - now() as retry_left, deadline.retry_until,
    job.schedule_id
from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
cross join lateral (
    select *
    from rota.jobs
    where jobs.job_id = attempt.job_id
      and jobs.fence_token = attempt.fence_token
      and jobs.leased_by = $1
    offset 0
) as job
cross join lateral (
    -- Clamped: one row that was written without the constraints must not make the statement fail for all rows.
    select least(greatest(job.scheduled_for, timestamptz 'epoch'), timestamptz '2200-01-01 00:00:00+00')
        + rota.bounded_duration(job.retry_for) as retry_until
) as deadline
