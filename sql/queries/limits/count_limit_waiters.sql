-- Count the due jobs that a limit applies to, at most $6. With $2 to $4, only those that are before a given job.
--   $1 key       text         limit_key, handler:NAME or queue:NAME
--   $2 priority  int2         null: count all
--   $3 run_at    timestamptz
--   $4 job_id    int8
--   $5 queue     text         only in this queue; null: in all
--   $6 limit     int8
--   -> jobs int8?
-- index: claim_due_jobs_idx (0002), claim_limited_jobs_idx, admit_waiting_jobs_idx (0012)
-- Loose index scans find the queues, priorities and handlers that have jobs, one probe for each.
with recursive asked as materialized (
    select
        case when $1 like 'handler:%' then substr($1, length('handler:') + 1) end as handler,
        case when $1 like 'queue:%' then substr($1, length('queue:') + 1) else $5 end as queue,
        case when $1 not like 'handler:%' and $1 not like 'queue:%' then $1 end as limit_key
),
ring as (
    (
        select job.queue, job.losses / 2 as suspects, job.priority, 1 as step
        from rota.jobs as job
        where job.state = 'limited'
        order by job.queue, (job.losses / 2), job.priority
        limit 1
    )
    union all
    select following.queue, following.suspects, following.priority, ring.step + 1
    from ring
    cross join lateral (
        select job.queue, job.losses / 2 as suspects, job.priority
        from rota.jobs as job
        where job.state = 'limited'
          and (job.queue, (job.losses / 2), job.priority) > (ring.queue, ring.suspects, ring.priority)
        order by job.queue, (job.losses / 2), job.priority
        limit 1
    ) as following
    where ring.step < 2000
),
lane as (
    (
        select job.queue, job.handler, job.losses / 2 as suspects, job.priority, 1 as step
        from rota.jobs as job
        where job.state = 'scheduled'
          and (select asked.limit_key from asked) is null
        order by job.queue, job.handler, (job.losses / 2), job.priority
        limit 1
    )
    union all
    select following.queue, following.handler, following.suspects, following.priority, lane.step + 1
    from lane
    cross join lateral (
        select job.queue, job.handler, job.losses / 2 as suspects, job.priority
        from rota.jobs as job
        where job.state = 'scheduled'
          and (job.queue, job.handler, (job.losses / 2), job.priority) > (lane.queue, lane.handler, lane.suspects, lane.priority)
        order by job.queue, job.handler, (job.losses / 2), job.priority
        limit 1
    ) as following
    where lane.step < 2000
)
select count(*) as jobs
from (
    select keyed.limit_key
    from ring
    cross join asked
    cross join lateral (
        select job.limit_key
        from rota.jobs as job
        where job.state = 'limited'
          and job.queue = ring.queue
          and (job.losses / 2) = ring.suspects
          and job.priority = ring.priority
          and job.limit_key >= coalesce(asked.limit_key, '')
          and job.limit_key <= coalesce(asked.limit_key, U&'\+10FFFF')
          and (asked.handler is null or job.handler = asked.handler)
          and ($2::int2 is null or ring.priority < $2 or (job.run_at, job.job_id) < ($3::timestamptz, $4::int8))
        limit $6
    ) as keyed
    where (asked.queue is null or ring.queue = asked.queue)
      and ($2::int2 is null or ring.priority <= $2)
    union all
    select admitted.limit_key
    from asked
    cross join lateral (
        select job.limit_key
        from rota.jobs as job
        where job.state = 'waiting'
          and job.run_at <= now()
          and (asked.limit_key is null or job.limit_key = asked.limit_key)
          and (asked.handler is null or job.handler = asked.handler)
          and (asked.queue is null or job.queue = asked.queue)
          and ($2::int2 is null or (job.priority, job.run_at, job.job_id) < ($2, $3, $4))
        order by job.run_at
        limit $6
    ) as admitted
    union all
    select keyless.limit_key
    from lane
    cross join asked
    cross join lateral (
        select job.limit_key
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
          and (job.losses / 2) = lane.suspects
          and job.priority = lane.priority
          and job.run_at <= now()
          and ($2::int2 is null or lane.priority < $2 or (job.run_at, job.job_id) < ($3::timestamptz, $4::int8))
        order by job.run_at
        limit $6
    ) as keyless
    where (asked.handler is null or lane.handler = asked.handler)
      and (asked.queue is null or lane.queue = asked.queue)
      and ($2::int2 is null or lane.priority <= $2)
    limit $6
) as job
