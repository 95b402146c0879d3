-- End jobs as expired whose start_by has passed and that never started.
--   $1 limit  int8
--   $2 only   int8[]  only these job_ids; null: all
--   -> job_id int8, handler text, queue text, schedule_id int8?
-- index: expire_unstarted_jobs_idx (0002), expire_unstarted_limited_jobs_idx (0012)
with overdue_jobs as materialized (
    select keyless.job_id
    from (
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
    ) as keyless
    union all
    select keyed.job_id
    from (
        select job.job_id
        from rota.jobs as job
        where job.start_by is not null
          and job.state in ('waiting', 'limited')
          and job.fence_token is null
          and job.start_by <= now()
          and ($2::int8[] is null or job.job_id = any ($2))
        order by job.start_by
        limit $1
        for update skip locked
    ) as keyed
),
expired_jobs as (
    delete from rota.jobs as job
    where job.job_id = any (array(select overdue_jobs.job_id from overdue_jobs))
      and job.fence_token is null
    returning job.*
),
ledger_rows as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome, handler, queue, unique_key,
        idempotency_key, meta, note
    )
    select
        job.job_id, job.schedule_id, job.scheduled_for, job.fence_token,
        job.started_at, clock_timestamp(), job.attempt, 'expired', job.handler, job.queue,
        job.unique_key, job.idempotency_key, job.meta, 'not begun by ' || job.start_by
    from expired_jobs as job
)
select job.job_id, job.handler, job.queue, job.schedule_id
from expired_jobs as job
