-- Request cancellation of the live jobs whose schedule has a waiting fire that replaces them.
--   $1 limit  int8
--   $2 only   int8[]  only these schedule_ids; null: all
--   -> requested int8?
-- index: promote_waiting_fires_idx (0005), jobs_exclusive_idx (0002), cancel_requests_pkey (0002)
-- A job whose cancellation an open transaction of a client has requested is left out.
with waiting_schedules as materialized (
    select distinct fire.schedule_id
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and fire.replaces
      and ($2::int8[] is null or fire.schedule_id = any ($2))
    order by fire.schedule_id
    limit $1
),
live_jobs as materialized (
    select job.job_id
    from rota.jobs as job
    where job.exclusive
      and job.schedule_id = any (array(select waiting_schedules.schedule_id from waiting_schedules))
      and (job.job_id in (select request.job_id from rota.cancel_requests as request)) is not true
)
select rota.request_cancellations(array(select live_jobs.job_id from live_jobs), 'replaced by a later fire of its schedule') as requested
