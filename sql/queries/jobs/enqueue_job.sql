-- Insert a job in the caller's transaction.
--   $1 handler    text
--   $2 payload    text    JSON, or null
--   $3 options    text    JSON object of the other public columns
--   -> job_id int8?, created bool?, outcome text?
select inserted.job_id, inserted.created, inserted.outcome
from pg_catalog.jsonb_to_record($3::pg_catalog.text::pg_catalog.jsonb) as options (
    queue pg_catalog.text, run_at pg_catalog.timestamptz, priority smallint, unique_key pg_catalog.text,
    on_conflict pg_catalog.text, max_attempts integer,
    backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery pg_catalog.text,
    start_by pg_catalog.timestamptz, idempotency_key pg_catalog.text, meta pg_catalog.jsonb, limit_key pg_catalog.text
)
cross join lateral rota.put_job(
    handler => $1,
    payload => $2::pg_catalog.text::pg_catalog.jsonb,
    queue => options.queue,
    run_at => options.run_at,
    priority => options.priority,
    unique_key => options.unique_key,
    on_conflict => options.on_conflict,
    max_attempts => options.max_attempts,
    backoff_base => options.backoff_base,
    backoff_cap => options.backoff_cap,
    retry_for => options.retry_for,
    timeout => options.timeout,
    lease => options.lease,
    delivery => options.delivery,
    start_by => options.start_by,
    idempotency_key => options.idempotency_key,
    meta => options.meta,
    limit_key => options.limit_key
) as inserted
