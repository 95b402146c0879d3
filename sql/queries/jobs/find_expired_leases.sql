-- Find running jobs whose lease has expired, with their retry settings. Returns jobs after job_id $1 and changes nothing.
--   $1 beyond  int8   0 at first, then the last job_id found, so that jobs that can't be settled do not fill every batch of a sweep
--   $2 limit   int8
--   -> job_id int8, fence_token int8, leased_by uuid, handler text, queue text, attempt int4, max_attempts int4?, losses int4, releases int4, delivery text?, backoff_base interval?, backoff_cap interval?, retry_left interval?, retry_until timestamptz?, schedule_id int8?
-- index: find_expired_leases_idx (0002)
-- Locked rows are skipped: otherwise they could fill every batch.
select
    job.job_id, job.fence_token, job.leased_by, job.handler, job.queue, job.attempt, job.max_attempts, job.losses,
    job.releases, job.delivery, rota.bounded_duration(job.backoff_base) as backoff_base,
    rota.bounded_duration(job.backoff_cap) as backoff_cap, deadline.retry_until - now() as retry_left, deadline.retry_until,
    job.schedule_id
from rota.jobs as job
cross join lateral (
    -- Clamped: one row that was written without the constraints must not make the statement fail for all rows.
    select least(greatest(job.scheduled_for, timestamptz 'epoch'), timestamptz '2200-01-01 00:00:00+00')
        + rota.bounded_duration(job.retry_for) as retry_until
) as deadline
where job.state = 'running'
  and job.job_id > $1
  and job.lease_expires_at < now()
order by job.job_id
limit $2
for update of job skip locked
