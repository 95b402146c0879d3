-- Cancel jobs that were asked to cancel while they ran and are now scheduled again. Also delete requests whose job is gone.
--   $1 limit  int8
--   $2 only   int8[]  only these job_ids; null: all
--   -> job_id int8, handler text, queue text
-- index: jobs_pkey (0002)
-- Requests of running jobs are excluded before the limit: old requests that a handler ignores must not hide newer ones.
with request as materialized (
    select open_request.job_id, open_request.requested_by, open_request.reason
    from rota.cancel_requests as open_request
    where (select jobs.leased_by from rota.jobs where jobs.job_id = open_request.job_id) is null
      and ($2::int8[] is null or open_request.job_id = any ($2))
    order by open_request.requested_at
    limit $1
),
cancellable as materialized (
    select job.job_id, request.requested_by, request.reason
    from request
    cross join lateral (
        select jobs.job_id
        from rota.jobs
        where jobs.job_id = request.job_id
          and jobs.leased_by is null
        for update skip locked
    ) as job
),
cancelled as (
    delete from rota.jobs as job
    using cancellable
    where job.job_id = any (array(select cancellable.job_id from cancellable))
      and cancellable.job_id = job.job_id
      and job.leased_by is null
    returning job.*, cancellable.requested_by, cancellable.reason
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue, unique_key,
        idempotency_key, meta, note
    )
    select
        cancelled.job_id, cancelled.schedule_id, cancelled.scheduled_for, cancelled.fence_token, cancelled.started_at,
        clock_timestamp(), cancelled.attempt, 'cancelled', cancelled.handler, cancelled.queue, cancelled.unique_key,
        cancelled.idempotency_key, cancelled.meta,
        'cancelled by ' || cancelled.requested_by || coalesce(': ' || cancelled.reason, '')
    from cancelled
),
requests_deleted as (
    delete from rota.cancel_requests as open_request
    using request
    where open_request.job_id = request.job_id
      and (
          request.job_id in (select cancelled.job_id from cancelled)
          or (select true from rota.jobs where jobs.job_id = request.job_id) is null
      )
)
select cancelled.job_id, cancelled.handler, cancelled.queue
from cancelled
