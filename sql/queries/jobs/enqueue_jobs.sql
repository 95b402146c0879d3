-- Insert many jobs of one handler in the caller's transaction, alike but for the payload.
--   $1 handler   text
--   $2 options   text    JSON object of the public columns that all of them share
--   $3 payloads  text    JSON array
--   -> done bool?
-- Apart from enqueue_keyed_jobs, because ON CONFLICT and a record for each job make it half as slow again as COPY. Nothing
-- is returned for each row, for the same reason: all are made, or none.
with made as (
    insert into rota.jobs (
        handler, payload, queue, run_at, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease,
        delivery, start_by, meta
    )
    select
        $1::pg_catalog.text, case when payload.value operator(pg_catalog.<>) 'null' then payload.value end,
        given.queue, given.run_at, given.priority, given.max_attempts,
        given.backoff_base, given.backoff_cap, given.retry_for, given.timeout, given.lease, given.delivery, given.start_by,
        given.meta
    from pg_catalog.jsonb_to_record($2::pg_catalog.text::pg_catalog.jsonb) as given (
        queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, max_attempts integer,
        backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
        start_by pg_catalog.timestamptz, meta pg_catalog.jsonb
    )
    cross join pg_catalog.jsonb_array_elements($3::pg_catalog.text::pg_catalog.jsonb) as payload (value)
)
select true as done
