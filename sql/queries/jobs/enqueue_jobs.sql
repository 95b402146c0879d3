-- Insert many jobs of one handler in the caller's transaction. They differ only in their payload.
--   $1 handler   text
--   $2 options   text    JSON object of the public columns, the same for all jobs
--   $3 payloads  text    JSON array
--   -> done bool?
-- enqueue_keyed_jobs is separate, because ON CONFLICT and one record per job add half to the time. No row is returned per job for
-- the same reason: the statement inserts all jobs or none.
with inserted_jobs as (
    insert into rota.jobs (
        handler, payload, queue, run_at, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery,
        start_by, meta, limit_key
    )
    select
        $1::pg_catalog.text, case when payload.value operator(pg_catalog.<>) 'null' then payload.value end, options.queue,
        options.run_at, options.priority, options.max_attempts, options.backoff_base, options.backoff_cap, options.retry_for,
        options.timeout, options.lease, options.delivery, options.start_by, options.meta, options.limit_key
    from pg_catalog.jsonb_to_record($2::pg_catalog.text::pg_catalog.jsonb) as options (
        queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, max_attempts integer, backoff_base interval,
        backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
        start_by pg_catalog.timestamptz, meta pg_catalog.jsonb, limit_key pg_catalog.text
    )
    cross join pg_catalog.jsonb_array_elements($3::pg_catalog.text::pg_catalog.jsonb) as payload (value)
)
select true as done
