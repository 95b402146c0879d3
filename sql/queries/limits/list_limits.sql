-- List limits and holds by key, with the jobs that run and wait under each.
--   $1 listed   int8  most rows
--   $2 counted  int8  count at most this many waiting jobs of a key, queue, priority and handler
--   $3 walked   int8  look at most at this many of those
--   -> key text?, is_limit bool?, max_running int4?, max_starts int4?, per interval?, weight int4?, note text?, declared_by text?, changed_at timestamptz?, held_until timestamptz?, hold_reason text?, running int8?, waiting int8?, more bool?, total int8?, now timestamptz?
--   is_limit    false: the key is only held, and has no row of its own in rota.limits
--   held_until  null unless the key is held now
--   waiting     due jobs that the limit applies to
--   more        waiting is a lower bound
--   total       number of all limits and holds
-- index: limits_pkey, limit_holds_pkey, claim_limited_jobs_idx, count_permits_idx (0012), claim_due_jobs_idx (0002)
with recursive limit_row as materialized (
    select
        limits.key, true as is_limit, limits.max_running, limits.max_starts, limits.per, limits.weight, limits.note,
        limits.declared_by, limits.changed_at, limits.held_until, limits.hold_reason
    from rota.limits
    union all
    select hold.key, false, null, null, null, null, null, null, hold.held_at, hold.held_until, hold.reason
    from rota.limit_holds as hold
    where hold.held_until > clock_timestamp()
      and not exists (select from rota.limits where limits.key = hold.key)
),
listed as materialized (
    select * from limit_row order by limit_row.key limit $1
),
-- Loose index scans: one probe for each combination that has jobs.
keyed as (
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
    where keyed.step < $3::int8
),
keyless as (
    (
        select job.queue, job.losses / 2 as suspects, job.priority, job.handler, 1 as step
        from rota.jobs as job
        where job.state = 'scheduled'
        order by job.queue, job.handler, (job.losses / 2), job.priority
        limit 1
    )
    union all
    select following.queue, following.suspects, following.priority, following.handler, keyless.step + 1
    from keyless
    cross join lateral (
        select job.queue, job.losses / 2 as suspects, job.priority, job.handler
        from rota.jobs as job
        where job.state = 'scheduled'
          and (job.queue, job.handler, (job.losses / 2), job.priority)
            > (keyless.queue, keyless.handler, keyless.suspects, keyless.priority)
        order by job.queue, job.handler, (job.losses / 2), job.priority
        limit 1
    ) as following
    where keyless.step < $3::int8
),
waiting as materialized (
    select keyed.limit_key, keyed.handler, keyed.queue, due.jobs
    from keyed
    cross join lateral (
        select count(*) as jobs
        from (
            select
            from rota.jobs as job
            where job.state = 'limited'
              and job.queue = keyed.queue
              and (job.losses / 2) = keyed.suspects
              and job.priority = keyed.priority
              and job.limit_key = keyed.limit_key
              and job.handler = keyed.handler
            limit $2
        ) as job
    ) as due
    union all
    select null, keyless.handler, keyless.queue, due.jobs
    from keyless
    cross join lateral (
        select count(*) as jobs
        from (
            select
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = keyless.queue
              and job.handler = keyless.handler
              and (job.losses / 2) = keyless.suspects
              and job.priority = keyless.priority
              and job.run_at <= now()
            limit $2
        ) as job
    ) as due
    where exists (select from listed where listed.key like 'handler:%' or listed.key like 'queue:%')
),
running as materialized (
    select job.limit_key, job.handler, job.queue, count(*) as jobs
    from rota.jobs as job
    where job.state = 'running'
    group by job.limit_key, job.handler, job.queue
),
-- The keys of jobs with the limit and the hold that applies to each.
used as (
    select used.key, sum(used.running) as running, sum(used.waiting) as waiting, bool_or(used.waiting >= $2) as more
    from (
        select name.key, 0 as running, waiting.jobs as waiting
        from waiting
        cross join lateral unnest(array[waiting.limit_key, 'handler:' || waiting.handler, 'queue:' || waiting.queue]) as name (key)
        union all
        select name.key, running.jobs, 0
        from running
        cross join lateral unnest(array[running.limit_key, 'handler:' || running.handler, 'queue:' || running.queue]) as name (key)
    ) as used
    where used.key is not null
    group by used.key
),
applied as (
    select rule.key, sum(used.running)::int8 as running, sum(used.waiting)::int8 as waiting, bool_or(used.more) as more
    from used
    cross join lateral (
        select limits.key from rota.limit_of(used.key) as limits
        union all
        select listed.key from listed where listed.key = used.key and not listed.is_limit
    ) as rule
    group by rule.key
)
select
    listed.key, listed.is_limit, listed.max_running, listed.max_starts, listed.per, listed.weight, listed.note, listed.declared_by,
    listed.changed_at, held.until as held_until, case when held.until is not null then held.reason end as hold_reason,
    coalesce(applied.running, 0) as running, coalesce(applied.waiting, 0) as waiting,
    coalesce(applied.more, false)
        or exists (select from keyed where keyed.step >= $3::int8) or exists (select from keyless where keyless.step >= $3::int8) as more,
    (select count(*) from limit_row) as total, now() as now
from listed
left join lateral (
    select listed.held_until as until, listed.hold_reason as reason where listed.held_until > clock_timestamp()
) as held on true
left join applied on applied.key = listed.key
order by listed.key
