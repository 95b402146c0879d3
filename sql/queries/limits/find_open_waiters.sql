-- Find due jobs whose key has a permit and a start left: the first job of each queue, priority, key and handler.
--   $1 walked  int8      look at most at this many of those
--   $2 older   interval  only jobs that have been due for longer
--   -> job_id int8?, queue text?, handler text?, limit_key text?, waited interval?
-- index: claim_limited_jobs_idx, count_permits_idx, limits_pkey (0012)
with recursive keyed as (
    (
        select job.queue, job.losses / 2 as suspects, job.priority, job.limit_key, job.handler, 1 as step
        from rota.jobs as job
        where job.state = 'limited'
        order by job.queue, (job.losses / 2), job.priority, job.limit_key, job.handler
        limit 1
    )
    union all
    select following.queue, following.suspects, following.priority, following.limit_key, following.handler, keyed.step + 1
    from keyed
    cross join lateral (
        select job.queue, job.losses / 2 as suspects, job.priority, job.limit_key, job.handler
        from rota.jobs as job
        where job.state = 'limited'
          and (job.queue, (job.losses / 2), job.priority, job.limit_key, job.handler)
            > (keyed.queue, keyed.suspects, keyed.priority, keyed.limit_key, keyed.handler)
        order by job.queue, (job.losses / 2), job.priority, job.limit_key, job.handler
        limit 1
    ) as following
    where keyed.step < $1::int8
)
select first_job.job_id, keyed.queue, keyed.handler, keyed.limit_key, now() - greatest(first_job.due_at, timestamptz 'epoch') as waited
from keyed
cross join lateral (
    select job.job_id, greatest(job.run_at, job.created_at) as due_at
    from rota.jobs as job
    where job.state = 'limited'
      and job.queue = keyed.queue
      and (job.losses / 2) = keyed.suspects
      and job.priority = keyed.priority
      and job.limit_key = keyed.limit_key
      and job.handler = keyed.handler
    order by job.run_at, job.job_id
    limit 1
) as first_job
left join lateral rota.limit_of(keyed.limit_key) as limits on true
left join rota.limit_holds as hold on hold.key = keyed.limit_key
left join lateral rota.permits_left(keyed.limit_key, limits.max_running) as permits on true
left join lateral rota.starts_left(keyed.limit_key, limits.max_starts, limits.per, clock_timestamp(), 1) as starts on true
where keyed.suspects = 0
  and first_job.due_at < now() - $2::interval
  and (greatest(limits.held_until, hold.held_until) > clock_timestamp()) is not true
  and (permits.free <= 0) is not true
  and (starts.free <= 0) is not true
