-- Return keys of due jobs to which no limit applies, each once.
--   $1 walked  int8  look at most at this many combinations of queue, priority and key
--   $2 limit   int8
--   -> key text?
-- index: claim_limited_jobs_idx, limits_pkey (0012)
with recursive keyed as (
    (
        select job.queue, job.losses / 2 as suspects, job.priority, job.limit_key, 1 as step
        from rota.jobs as job
        where job.state = 'limited'
        order by job.queue, (job.losses / 2), job.priority, job.limit_key
        limit 1
    )
    union all
    select following.queue, following.suspects, following.priority, following.limit_key, keyed.step + 1
    from keyed
    cross join lateral (
        select job.queue, job.losses / 2 as suspects, job.priority, job.limit_key
        from rota.jobs as job
        where job.state = 'limited'
          and (job.queue, (job.losses / 2), job.priority, job.limit_key)
            > (keyed.queue, keyed.suspects, keyed.priority, keyed.limit_key)
        order by job.queue, (job.losses / 2), job.priority, job.limit_key
        limit 1
    ) as following
    where keyed.step < $1::int8
)
select distinct keyed.limit_key as key
from keyed
where not exists (select from rota.limit_of(keyed.limit_key))
order by key
limit $2
