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
cancellable_jobs as materialized (
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
cancelled_jobs as (
    delete from rota.jobs as job
    using cancellable_jobs
    where job.job_id = any (array(select cancellable_jobs.job_id from cancellable_jobs))
      and cancellable_jobs.job_id = job.job_id
      and job.leased_by is null
    returning job.*, cancellable_jobs.requested_by, cancellable_jobs.reason
),
ledger_rows as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue, unique_key,
        idempotency_key, meta, note
    )
    select
        job.job_id, job.schedule_id, job.scheduled_for, job.fence_token,
        job.started_at, clock_timestamp(), job.attempt, 'cancelled', job.handler,
        job.queue, job.unique_key, job.idempotency_key, job.meta,
        'cancelled by ' || job.requested_by || coalesce(': ' || job.reason, '')
    from cancelled_jobs as job
),
deleted_requests as (
    delete from rota.cancel_requests as open_request
    using request
    where open_request.job_id = request.job_id
      and (
          request.job_id in (select cancelled_jobs.job_id from cancelled_jobs)
          or (select true from rota.jobs where jobs.job_id = request.job_id) is null
      )
)
select job.job_id, job.handler, job.queue
from cancelled_jobs as job
