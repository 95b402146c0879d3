-- Make a dead letter of a scheduled job whose own values make its claim fail. Copies the values and computes with none of them.
--   $1 job_id      int8
--   $2 error_kind  text
--   $3 error       text
--   $4 alert       text  the handler that gets a job for each dead letter; null: none
--   -> attempt int4
-- index: jobs_pkey (0002)
with held as materialized (
    select job.job_id
    from rota.jobs as job
    where job.job_id = $1
      and job.state = 'scheduled'
    for update skip locked
),
ended as (
    delete from rota.jobs as job
    where job.job_id = any (array(select held.job_id from held))
    returning job.*
),
buried as (
    insert into rota.dead_letters (
        job_id, run_at, scheduled_for, created_at, fence_token, node, started_at, schedule_id, attempt, losses, releases,
        max_attempts, priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, retry_for,
        timeout, lease, unique_key, idempotency_key, meta, checkpoint, progress, progress_note, reason, error_kind, error
    )
    select
        ended.job_id, ended.run_at, ended.scheduled_for, ended.created_at, ended.fence_token, null, ended.started_at,
        ended.schedule_id, ended.attempt, ended.losses, ended.releases, ended.max_attempts, ended.priority, ended.exclusive,
        ended.handler, ended.queue, ended.created_by, ended.payload, ended.delivery, ended.backoff_base, ended.backoff_cap,
        ended.retry_for, ended.timeout, ended.lease, ended.unique_key, ended.idempotency_key, ended.meta, ended.checkpoint,
        ended.progress, ended.progress_note, 'permanent', $2, $3
    from ended
),
alerted as (
    insert into rota.jobs (handler, payload)
    select
        $4,
        jsonb_build_object(
            'job_id', ended.job_id, 'handler', ended.handler, 'queue', ended.queue, 'reason', 'permanent',
            'error_kind', $2::text, 'error', $3::text
        )
    from ended
    where ended.handler <> $4
),
answered as (
    delete from rota.cancel_requests as request
    where request.job_id = any (array(select ended.job_id from ended))
)
select ended.attempt
from ended
