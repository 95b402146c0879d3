-- Return the live jobs of a handler as JSON, for rota.testing. Intervals are in seconds.
--   $1 handler  text
--   -> jobs text?      JSON array of objects, oldest first, at most 1,000
select coalesce(pg_catalog.json_agg(live order by live.job_id), '[]')::pg_catalog.text as jobs
from (
    select
        job.job_id, job.payload, job.queue, job.run_at, job.priority, job.unique_key, job.max_attempts,
        extract(epoch from job.backoff_base) as backoff_base, extract(epoch from job.backoff_cap) as backoff_cap,
        extract(epoch from job.retry_for) as retry_for, extract(epoch from job.timeout) as timeout,
        extract(epoch from job.lease) as lease, job.delivery, job.start_by, job.idempotency_key, job.meta, job.limit_key
    from rota.jobs as job
    where job.handler operator(pg_catalog.=) $1
    order by job.job_id
    limit 1000
) as live
