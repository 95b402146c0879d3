-- Find the rows that a statement selects, after the statement failed on one of them. Locks nothing.
--   $1 doing  text  which statement: expire | cancel | promote | replace
--   $2 limit  int8
--   -> id int8?, name text?   job_id (expire, cancel) or schedule_id and its name (promote, replace)
-- index: expire_unstarted_jobs_idx, jobs_pkey (0002), promote_waiting_fires_idx (0005), expire_unstarted_limited_jobs_idx (0012)
(
    select job.job_id as id, null::text as name
    from rota.jobs as job
    where $1 = 'expire'
      and job.start_by is not null
      and job.state = 'scheduled'
      and job.fence_token is null
      and job.start_by <= now()
    order by job.start_by
    limit $2
)
union all
(
    select job.job_id, null
    from rota.jobs as job
    where $1 = 'expire'
      and job.start_by is not null
      and job.state in ('waiting', 'limited')
      and job.fence_token is null
      and job.start_by <= now()
    order by job.start_by
    limit $2
)
union all
(
    select request.job_id, null
    from rota.cancel_requests as request
    where $1 = 'cancel'
      and (select jobs.leased_by from rota.jobs where jobs.job_id = request.job_id) is null
    order by request.requested_at
    limit $2
)
union all
(
    select distinct on (fire.schedule_id) fire.schedule_id, fire.name
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and ($1 = 'promote' or $1 = 'replace' and fire.replaces)
    order by fire.schedule_id, fire.scheduled_for
    limit $2
)
