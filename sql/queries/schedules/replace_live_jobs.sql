-- Ask the live jobs to cancel whose schedules have a fire waiting that is to replace them.
--   $1 limit  int8
--   $2 only   int8[]  only these schedule_ids; null: any
--   -> asked int8?, told int8?
-- index: promote_waiting_fires_idx (0005), jobs_exclusive_idx (0002), cancel_requests_pkey (0002)
-- Ordered only once they are found: for the order's sake a plan made early walks all live jobs by their primary key.
with waiting as materialized (
    select distinct fire.schedule_id
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and fire.replaces
      and ($2::int8[] is null or fire.schedule_id = any ($2))
    order by fire.schedule_id
    limit $1
),
live as materialized (
    select job.job_id
    from rota.jobs as job
    where job.exclusive
      and job.schedule_id = any (array(select waiting.schedule_id from waiting))
      and (job.job_id in (select request.job_id from rota.cancel_requests as request)) is not true
),
asked as (
    insert into rota.cancel_requests (job_id, requested_by, reason)
    select live.job_id, rota.caller(), 'replaced by a later fire of its schedule'
    from live
    order by live.job_id
    on conflict do nothing
    returning job_id
),
told as (
    select rota.tell('rota_cancel', '')
    from asked
    limit 1
)
select (select count(*) from asked) as asked, (select count(*) from told) as told
