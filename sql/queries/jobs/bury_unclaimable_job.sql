-- Move a scheduled job to the dead letters because its values make every claim fail. Copies the values without computing with them.
--   $1 job_id      int8
--   $2 error_kind  text
--   $3 error       text
--   $4 alert       text  handler to enqueue a job for, with the dead letter as its payload; null: none
--   -> attempt int4
-- index: jobs_pkey (0002)
with locked as materialized (
    select job.job_id
    from rota.jobs as job
    where job.job_id = $1
      and job.state = 'scheduled'
    for update skip locked
),
deleted as (
    delete from rota.jobs as job
    where job.job_id = any (array(select locked.job_id from locked))
    returning job.*
),
buried as (
    insert into rota.dead_letters (
        job_id, run_at, scheduled_for, created_at, fence_token, node, started_at, schedule_id, attempt, losses, releases,
        max_attempts, priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, retry_for,
        timeout, lease, unique_key, idempotency_key, meta, checkpoint, progress, progress_note, reason, error_kind, error
    )
    select
        deleted.job_id, deleted.run_at, deleted.scheduled_for, deleted.created_at, deleted.fence_token, null,
        deleted.started_at, deleted.schedule_id, deleted.attempt, deleted.losses, deleted.releases, deleted.max_attempts,
        deleted.priority, deleted.exclusive, deleted.handler, deleted.queue, deleted.created_by, deleted.payload,
        deleted.delivery, deleted.backoff_base, deleted.backoff_cap, deleted.retry_for, deleted.timeout, deleted.lease,
        deleted.unique_key, deleted.idempotency_key, deleted.meta, deleted.checkpoint, deleted.progress, deleted.progress_note,
        'permanent', $2, $3
    from deleted
),
alert_enqueued as (
    insert into rota.jobs (handler, payload)
    select
        $4,
        jsonb_build_object(
            'job_id', deleted.job_id, 'handler', deleted.handler, 'queue', deleted.queue, 'reason', 'permanent', 'error_kind',
            $2::text, 'error', $3::text
        )
    from deleted
    where deleted.handler <> $4
),
cancel_requests_deleted as (
    delete from rota.cancel_requests as request
    where request.job_id = any (array(select deleted.job_id from deleted))
)
select deleted.attempt
from deleted
