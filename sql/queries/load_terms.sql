-- Read the terms on which attempts of node $1 are retried, for those that did not succeed.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   -> job_id int8, fence_token int8, leased_by uuid, handler text, queue text, attempt int4, max_attempts int4?, losses int4, releases int4, delivery text?, backoff_base interval?, backoff_cap interval?, retry_left interval?, retry_until timestamptz?, schedule_id int8?
-- index: jobs_pkey (0002)
select
    job.job_id, job.fence_token, job.leased_by, job.handler, job.queue, job.attempt, job.max_attempts, job.losses,
    job.releases, job.delivery, job.backoff_base, job.backoff_cap, job.scheduled_for + job.retry_for - now() as retry_left,
    job.scheduled_for + job.retry_for as retry_until, job.schedule_id
from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
cross join lateral (
    select *
    from rota.jobs
    where jobs.job_id = attempt.job_id
      and jobs.fence_token = attempt.fence_token
      and jobs.leased_by = $1
    offset 0
) as job
