-- Insert many jobs of one handler that differ in more than the payload; live jobs that have the unique_key are left alone.
--   $1 handler   text
--   $2 options   text    JSON object of the public columns that all of them share
--   $3 jobs      text    JSON array of objects: payload, and what is each job's own
--   -> created int8?
-- In the order of their keys: two clients with the same keys in other orders would deadlock otherwise.
with created as (
    insert into rota.jobs (
        handler, payload, queue, run_at, priority, unique_key, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_by, idempotency_key, meta
    )
    select
        $1::pg_catalog.text, job.payload, given.queue, coalesce(job.run_at, given.run_at), coalesce(job.priority, given.priority),
        job.unique_key, given.max_attempts, given.backoff_base, given.backoff_cap, given.retry_for, given.timeout,
        given.lease, given.delivery, given.start_by, job.idempotency_key, coalesce(job.meta, given.meta)
    from pg_catalog.jsonb_to_record($2::pg_catalog.text::pg_catalog.jsonb) as given (
        queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, max_attempts integer,
        backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
        start_by pg_catalog.timestamptz, meta pg_catalog.jsonb
    )
    cross join pg_catalog.jsonb_to_recordset($3::pg_catalog.text::pg_catalog.jsonb) as job (
        payload pg_catalog.jsonb, run_at pg_catalog.timestamptz, priority smallint, unique_key pg_catalog.text,
        idempotency_key pg_catalog.text, meta pg_catalog.jsonb
    )
    order by job.unique_key
    on conflict (handler, unique_key) where unique_key is not null do nothing
    returning job_id
)
select pg_catalog.count(*) as created from created
