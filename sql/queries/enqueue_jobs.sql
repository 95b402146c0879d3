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
        $1::text, nullif(payload.value, 'null'), given.queue, given.run_at, given.priority, given.max_attempts,
        given.backoff_base, given.backoff_cap, given.retry_for, given.timeout, given.lease, given.delivery, given.start_by,
        given.meta
    from jsonb_to_record($2::text::jsonb) as given (
        queue text, run_at timestamptz, priority smallint, max_attempts integer, backoff_base interval, backoff_cap interval,
        retry_for interval, timeout interval, lease interval, delivery text, start_by timestamptz, meta jsonb
    )
    cross join jsonb_array_elements($3::text::jsonb) as payload (value)
)
select true as done
