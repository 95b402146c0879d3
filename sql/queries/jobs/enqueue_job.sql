-- Insert a job in the caller's transaction.
--   $1 handler    text
--   $2 payload    text    JSON, or null
--   $3 options    text    JSON object of the other public columns
--   -> job_id int8?, created bool?, outcome text?
select made.job_id, made.created, made.outcome
from pg_catalog.jsonb_to_record($3::pg_catalog.text::pg_catalog.jsonb) as given (
    queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, unique_key pg_catalog.text,
    on_conflict pg_catalog.text, max_attempts integer,
    backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
    start_by pg_catalog.timestamptz, idempotency_key pg_catalog.text, meta pg_catalog.jsonb
)
cross join lateral rota.put_job(
    handler => $1,
    payload => $2::pg_catalog.text::pg_catalog.jsonb,
    queue => given.queue,
    run_at => given.run_at,
    priority => given.priority,
    unique_key => given.unique_key,
    on_conflict => given.on_conflict,
    max_attempts => given.max_attempts,
    backoff_base => given.backoff_base,
    backoff_cap => given.backoff_cap,
    retry_for => given.retry_for,
    timeout => given.timeout,
    lease => given.lease,
    delivery => given.delivery,
    start_by => given.start_by,
    idempotency_key => given.idempotency_key,
    meta => given.meta
) as made
