-- Insert many jobs of one handler that differ in more than the payload. Skips those whose unique_key a live job has.
--   $1 handler   text
--   $2 options   text    JSON object of the public columns, the same for all jobs
--   $3 jobs      text    JSON array of objects: payload, run_at, priority, unique_key, idempotency_key, meta and limit_key of each job
--   -> created int8?
-- Insert in the order of the keys: two clients that insert the same keys in different orders would deadlock.
with created_jobs as (
    insert into rota.jobs (
        handler, payload, queue, run_at, priority, unique_key, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_by, idempotency_key, meta, limit_key
    )
    select
        $1::pg_catalog.text, job.payload, options.queue, coalesce(job.run_at, options.run_at),
        coalesce(job.priority, options.priority), job.unique_key, options.max_attempts, options.backoff_base,
        options.backoff_cap, options.retry_for, options.timeout, options.lease, options.delivery, options.start_by,
        job.idempotency_key, coalesce(job.meta, options.meta), coalesce(job.limit_key, options.limit_key)
    from pg_catalog.jsonb_to_record($2::pg_catalog.text::pg_catalog.jsonb) as options (
        queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, max_attempts integer, backoff_base interval,
        backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
        start_by pg_catalog.timestamptz, meta pg_catalog.jsonb, limit_key pg_catalog.text
    )
    cross join pg_catalog.jsonb_to_recordset($3::pg_catalog.text::pg_catalog.jsonb) as job (
        payload pg_catalog.jsonb, run_at pg_catalog.timestamptz, priority smallint, unique_key pg_catalog.text,
        idempotency_key pg_catalog.text, meta pg_catalog.jsonb, limit_key pg_catalog.text
    )
    order by job.unique_key
    on conflict (handler, unique_key) where unique_key is not null do nothing
    returning job_id
)
select pg_catalog.count(*) as created from created_jobs
