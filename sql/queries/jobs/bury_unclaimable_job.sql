-- Move a scheduled job to the dead letters because its values make every claim fail. Copies the values without computing with them.
--   $1 job_id      int8
--   $2 error_kind  text
--   $3 error       text
--   $4 alert       text  handler to enqueue a job for, with the dead letter as its payload; null: none
--   -> attempt int4
-- index: jobs_pkey (0002)
with locked_job as materialized (
    select job.job_id
    from rota.jobs as job
    where job.job_id = $1
      and job.state <> 'running'
    for update skip locked
),
deleted_job as (
    delete from rota.jobs as job
    where job.job_id = any (array(select locked_job.job_id from locked_job))
    returning job.*
),
dead_letter as (
    insert into rota.dead_letters (
        job_id, run_at, scheduled_for, created_at, fence_token, node, started_at, schedule_id, attempt, losses, releases,
        max_attempts, priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, retry_for,
        timeout, lease, unique_key, idempotency_key, meta, checkpoint, progress, progress_note, limit_key, reason, error_kind, error
    )
    select
        job.job_id, job.run_at, job.scheduled_for, job.created_at, job.fence_token, null,
        job.started_at, job.schedule_id, job.attempt, job.losses, job.releases,
        job.max_attempts, job.priority, job.exclusive, job.handler, job.queue,
        job.created_by, job.payload, job.delivery, job.backoff_base, job.backoff_cap,
        job.retry_for, job.timeout, job.lease, job.unique_key, job.idempotency_key,
        job.meta, job.checkpoint, job.progress, job.progress_note, job.limit_key, 'permanent', $2, $3
    from deleted_job as job
),
alert_job as (
    insert into rota.jobs (handler, payload)
    select
        $4,
        jsonb_build_object(
            'job_id', job.job_id, 'handler', job.handler, 'queue', job.queue, 'reason', 'permanent',
            'error_kind', $2::text, 'error', $3::text
        )
    from deleted_job as job
    where job.handler <> $4
),
deleted_requests as (
    delete from rota.cancel_requests as request
    where request.job_id = any (array(select deleted_job.job_id from deleted_job))
)
select job.attempt
from deleted_job as job
