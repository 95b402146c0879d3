-- End jobs that were to begin by an instant that has passed, and never began.
--   $1 limit  int8
--   $2 only   int8[]  only these job_ids; null: any
--   -> job_id int8, handler text, queue text, schedule_id int8?
-- index: expire_unstarted_jobs_idx (0002)
with late as materialized (
    select job.job_id
    from rota.jobs as job
    where job.start_by is not null
      and job.state = 'scheduled'
      and job.fence_token is null
      and job.start_by <= now()
      and ($2::int8[] is null or job.job_id = any ($2))
    order by job.start_by
    limit $1
    for update skip locked
),
ended as (
    delete from rota.jobs as job
    where job.job_id = any (array(select late.job_id from late))
      and job.fence_token is null
    returning job.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, note
    )
    select
        ended.job_id, ended.schedule_id, ended.scheduled_for, ended.fence_token, ended.started_at, clock_timestamp(),
        ended.attempt, 'expired', ended.handler, ended.queue, ended.unique_key, ended.idempotency_key, ended.meta,
        'not begun by ' || ended.start_by
    from ended
)
select ended.job_id, ended.handler, ended.queue, ended.schedule_id
from ended
