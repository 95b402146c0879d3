-- Cancel waiting jobs that somebody asked to cancel while they ran, and forget requests whose job is gone.
--   $1 limit  int8
--   $2 only   int8[]  only these job_ids; null: any
--   -> job_id int8, handler text, queue text
-- index: jobs_pkey (0002)
-- Requests whose job still runs are left out before the limit: old ones that nobody obeys must not hide the younger.
with request as materialized (
    select asked.job_id, asked.requested_by, asked.reason
    from rota.cancel_requests as asked
    where (select jobs.leased_by from rota.jobs where jobs.job_id = asked.job_id) is null
      and ($2::int8[] is null or asked.job_id = any ($2))
    order by asked.requested_at
    limit $1
),
waiting as materialized (
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
ended as (
    delete from rota.jobs as job
    using waiting
    where job.job_id = any (array(select waiting.job_id from waiting))
      and waiting.job_id = job.job_id
      and job.leased_by is null
    returning job.*, waiting.requested_by, waiting.reason
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, note
    )
    select
        ended.job_id, ended.schedule_id, ended.scheduled_for, ended.fence_token, ended.started_at, clock_timestamp(),
        ended.attempt, 'cancelled', ended.handler, ended.queue, ended.unique_key, ended.idempotency_key, ended.meta,
        'cancelled by ' || ended.requested_by || coalesce(': ' || ended.reason, '')
    from ended
),
forgotten as (
    delete from rota.cancel_requests as asked
    using request
    where asked.job_id = request.job_id
      and (
          request.job_id in (select ended.job_id from ended)
          or (select true from rota.jobs where jobs.job_id = request.job_id) is null
      )
)
select ended.job_id, ended.handler, ended.queue
from ended
