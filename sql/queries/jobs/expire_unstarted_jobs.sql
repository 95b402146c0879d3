-- End jobs as expired whose start_by has passed and that never started.
--   $1 limit  int8
--   $2 only   int8[]  only these job_ids; null: all
--   -> job_id int8, handler text, queue text, schedule_id int8?
-- index: expire_unstarted_jobs_idx (0002)
with overdue as materialized (
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
expired as (
    delete from rota.jobs as job
    where job.job_id = any (array(select overdue.job_id from overdue))
      and job.fence_token is null
    returning job.*
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue, unique_key,
        idempotency_key, meta, note
    )
    select
        expired.job_id, expired.schedule_id, expired.scheduled_for, expired.fence_token, expired.started_at, clock_timestamp(),
        expired.attempt, 'expired', expired.handler, expired.queue, expired.unique_key, expired.idempotency_key, expired.meta,
        'not begun by ' || expired.start_by
    from expired
)
select expired.job_id, expired.handler, expired.queue, expired.schedule_id
from expired
