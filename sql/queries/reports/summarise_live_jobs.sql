-- Count the live jobs by queue, handler and priority (a lane), at a bounded cost at any number of jobs.
-- Up to $1 jobs are counted exactly. With more, the lanes are found in the index, and each is counted up to a share of $1.
-- At most $3 rows name a handler: first registered handlers in known queues, then those that have waited longest.
--   $1 counted   int8  count up to this many live jobs exactly; with more, counts are lower bounds (at_least)
--   $2 explored  int8  with more jobs, find up to this many lanes; lanes of registered handlers are always found
--   $3 shown     int8  return up to this many rows with a handler; other lanes are summed up in rows without a handler
--   -> queue text?, handler text?, priority int2?, registered bool?, due int8?, limited int8?, running int8?, retrying int8?, future int8?, expired int8?, oldest_due interval?, oldest_running interval?, at_least bool?, unexplored bool?, more_lanes int8?, more_queues int8?
--   due, limited             due jobs without and with a limit or hold that applies to them
--   unexplored               there are more lanes than were found
--   more_lanes, more_queues  number of lanes in the rows without a handler, and of queues in the rows without a queue
-- index: jobs_pkey, claim_due_jobs_idx, find_expired_leases_idx (0002), claim_limited_jobs_idx, admit_waiting_jobs_idx (0012)
-- Ages, running and expired jobs are exact at any size: they come from the first entries of claim_due_jobs_idx, and from all of
-- find_expired_leases_idx, which holds only running jobs.
-- Limits need an order, because a scan without one may start anywhere in the table.
-- Instants are clamped to the years from 1970 to now, so that no subtraction can overflow.
with recursive first_jobs as materialized (
    select job.queue, job.handler, job.priority, job.run_at, job.created_at, job.attempt, job.state, job.limit_key
    from rota.jobs as job
    order by job.job_id
    limit $1::int8 + 1
),
counting as materialized (
    select count(*) <= $1 as is_exact from first_jobs
),
-- A loose index scan: each step is one probe for the first entry of the next (queue, handler, suspects, priority).
found_lane (queue, handler, suspects, priority, run_at, created_at, step) as (
    (
        select job.queue, job.handler, job.losses / 2, job.priority, job.run_at, job.created_at, 1
        from rota.jobs as job
        where job.state = 'scheduled'
          and not (select counting.is_exact from counting)
        order by job.queue, job.handler, (job.losses / 2), job.priority, job.run_at
        limit 1
    )
    union all
    select following.queue, following.handler, following.suspects, following.priority, following.run_at, following.created_at,
        found_lane.step + 1
    from found_lane
    cross join lateral (
        select job.queue, job.handler, job.losses / 2 as suspects, job.priority, job.run_at, job.created_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and (job.queue, job.handler, (job.losses / 2), job.priority)
            > (found_lane.queue, found_lane.handler, found_lane.suspects, found_lane.priority)
        order by job.queue, job.handler, (job.losses / 2), job.priority, job.run_at
        limit 1
    ) as following
    where found_lane.step < $2::int8
),
-- If the scan stopped early, the lanes of registered handlers after that point are probed one by one.
registered_lane as materialized (
    select handler.handler, coalesce(handler.queue, 'default') as queue
    from rota.handlers as handler
    where handler.seen_at is not null
    order by handler.seen_at desc
    limit 1000
),
served_queue as materialized (
    select distinct node_queue.queue
    from rota.nodes as node
    cross join lateral unnest(node.queues) as node_queue (queue)
    where node.seen_at > now() - interval '15 seconds'
),
probed_lane as materialized (
    select first_job.queue, first_job.handler, first_job.suspects, first_job.priority, first_job.run_at, first_job.created_at
    from (
        select pair.queue, pair.handler
        from (
            select registered_lane.queue, registered_lane.handler from registered_lane
            union
            select served_queue.queue, registered_lane.handler from served_queue cross join registered_lane
        ) as pair
        where exists (select from found_lane where found_lane.step >= $2)
          and (pair.queue, pair.handler) >= (select last.queue, last.handler from found_lane as last where last.step >= $2)
        limit 2000
    ) as lane
    cross join lateral (
        select from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
        limit 1
    ) as used
    cross join generate_series(0, 1) as suspect (suspects)
    cross join generate_series(0, 9) as each (priority)
    cross join lateral (
        select job.queue, job.handler, job.losses / 2 as suspects, job.priority, job.run_at, job.created_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
          and (job.losses / 2) = suspect.suspects
          and job.priority = each.priority
        order by job.run_at
        limit 1
    ) as first_job
),
lane_head as materialized (
    select found_lane.queue, found_lane.handler, found_lane.suspects, found_lane.priority, found_lane.run_at, found_lane.created_at
    from found_lane
    union
    select
        probed_lane.queue, probed_lane.handler, probed_lane.suspects, probed_lane.priority, probed_lane.run_at,
        probed_lane.created_at
    from probed_lane
),
-- The queues and priorities of due jobs with a key, found in the same way.
limited_lane (queue, suspects, priority, step) as (
    (
        select job.queue, job.losses / 2, job.priority, 1
        from rota.jobs as job
        where job.state = 'limited'
          and not (select counting.is_exact from counting)
        order by job.queue, (job.losses / 2), job.priority
        limit 1
    )
    union all
    select following.queue, following.suspects, following.priority, limited_lane.step + 1
    from limited_lane
    cross join lateral (
        select job.queue, job.losses / 2 as suspects, job.priority
        from rota.jobs as job
        where job.state = 'limited'
          and (job.queue, (job.losses / 2), job.priority) > (limited_lane.queue, limited_lane.suspects, limited_lane.priority)
        order by job.queue, (job.losses / 2), job.priority
        limit 1
    ) as following
    where limited_lane.step < $2::int8
),
lane_limit as materialized (
    select greatest(10, $1 / greatest(1, (select count(*) from lane_head) + (select count(*) from limited_lane)) / 2) as most
),
waiting_counts as (
    select
        first_jobs.queue, first_jobs.handler, first_jobs.priority, first_jobs.limit_key,
        count(*) filter (where first_jobs.run_at <= now()) as due,
        count(*) filter (where first_jobs.run_at > now() and first_jobs.attempt > 0) as retrying,
        count(*) filter (where first_jobs.run_at > now() and first_jobs.attempt = 0) as future,
        min(greatest(first_jobs.run_at, first_jobs.created_at)) filter (where first_jobs.run_at <= now()) as due_since
    from first_jobs
    where first_jobs.state <> 'running'
      and (select counting.is_exact from counting)
    group by first_jobs.queue, first_jobs.handler, first_jobs.priority, first_jobs.limit_key
    union all
    select keyed.queue, keyed.handler, keyed.priority, keyed.limit_key, count(*) filter (where keyed.run_at <= now()),
        count(*) filter (where keyed.run_at > now() and keyed.attempt > 0),
        count(*) filter (where keyed.run_at > now() and keyed.attempt = 0),
        min(greatest(keyed.run_at, keyed.created_at)) filter (where keyed.run_at <= now())
    from (
        select due.*
        from limited_lane
        cross join lateral (
            select job.queue, job.handler, job.priority, job.limit_key, job.run_at, job.created_at, job.attempt
            from rota.jobs as job
            where job.state = 'limited'
              and job.queue = limited_lane.queue
              and (job.losses / 2) = limited_lane.suspects
              and job.priority = limited_lane.priority
            order by job.limit_key
            limit (select lane_limit.most from lane_limit)
        ) as due
        union all
        (
            select job.queue, job.handler, job.priority, job.limit_key, job.run_at, job.created_at, job.attempt
            from rota.jobs as job
            where job.state = 'waiting'
              and not (select counting.is_exact from counting)
            order by job.run_at
            limit (select lane_limit.most from lane_limit)
        )
    ) as keyed
    group by keyed.queue, keyed.handler, keyed.priority, keyed.limit_key
    union all
    select lane_head.queue, lane_head.handler, lane_head.priority, null, due.jobs, later.retrying, later.jobs - later.retrying, due.since
    from lane_head
    cross join lateral (
        -- A job inserted with a run_at in the past has waited only since its creation, so the oldest run_at alone is not enough.
        select count(*) as jobs, min(greatest(job.run_at, job.created_at)) as since
        from (
            select job.run_at, job.created_at
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = lane_head.queue
              and job.handler = lane_head.handler
              and (job.losses / 2) = lane_head.suspects
              and job.priority = lane_head.priority
              and job.run_at <= now()
            order by job.run_at
            limit (select lane_limit.most from lane_limit)
        ) as job
    ) as due
    cross join lateral (
        select count(*) as jobs, count(*) filter (where job.attempt > 0) as retrying
        from (
            select job.attempt
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = lane_head.queue
              and job.handler = lane_head.handler
              and (job.losses / 2) = lane_head.suspects
              and job.priority = lane_head.priority
              and job.run_at > now()
            order by job.run_at
            limit (select lane_limit.most from lane_limit)
        ) as job
    ) as later
),
limit_pattern as materialized (
    select limits.key, left(limits.key, -1) as beginning from rota.limits where right(limits.key, 1) = '*'
),
limited_counts as (
    select waiting_counts.*,
        exists (
            select
            from unnest(array[waiting_counts.limit_key, 'handler:' || waiting_counts.handler, 'queue:' || waiting_counts.queue])
                as applied (key)
            where applied.key in (select limits.key from rota.limits)
               or applied.key in (select hold.key from rota.limit_holds as hold where hold.held_until > now())
               or exists (
                   select
                   from limit_pattern
                   where starts_with(applied.key, limit_pattern.beginning)
                     and starts_with(applied.key, 'handler:') = starts_with(limit_pattern.key, 'handler:')
                     and starts_with(applied.key, 'queue:') = starts_with(limit_pattern.key, 'queue:')
               )
        ) as is_limited
    from waiting_counts
),
running_counts as (
    select
        job.queue, job.handler, job.priority,
        count(*) as running,
        count(*) filter (where job.lease_expires_at < now()) as expired,
        min(job.started_at) as running_since
    from (
        select job.queue, job.handler, job.priority, job.lease_expires_at, job.started_at
        from rota.jobs as job
        where job.state = 'running'
        order by job.job_id
    ) as job
    group by job.queue, job.handler, job.priority
),
lane as materialized (
    select
        part.queue, part.handler, part.priority,
        part.handler in (select handler.handler from rota.handlers as handler where handler.seen_at is not null) as registered,
        part.queue in (select served_queue.queue from served_queue union select registered_lane.queue from registered_lane) as known,
        sum(part.due)::int8 as due, sum(part.limited)::int8 as limited, sum(part.running)::int8 as running, sum(part.retrying)::int8 as retrying,
        sum(part.future)::int8 as future, sum(part.expired)::int8 as expired, min(part.due_since) as due_since,
        min(part.running_since) as running_since
    from (
        select
            waiting.queue, waiting.handler, waiting.priority,
            case when waiting.is_limited then 0 else waiting.due end as due,
            case when waiting.is_limited then waiting.due else 0 end as limited,
            0 as running, waiting.retrying, waiting.future, 0 as expired,
            case when not waiting.is_limited then waiting.due_since end as due_since, null::timestamptz as running_since
        from limited_counts as waiting
        union all
        select running_counts.queue, running_counts.handler, running_counts.priority, 0, 0, running_counts.running, 0, 0,
            running_counts.expired, null, running_counts.running_since
        from running_counts
    ) as part
    group by part.queue, part.handler, part.priority
),
ranked_lane as materialized (
    select
        lane.*,
        row_number() over (
            order by
                lane.registered and lane.known desc, lane.registered desc, lane.known desc, lane.due_since nulls last,
                lane.queue, lane.handler, lane.priority
        ) <= $3 as shown
    from lane
),
result_row as (
    select
        case when ranked_lane.shown or ranked_lane.known then ranked_lane.queue end as queue,
        case when ranked_lane.shown then ranked_lane.handler end as handler,
        ranked_lane.priority, ranked_lane.registered,
        sum(ranked_lane.due)::int8 as due, sum(ranked_lane.limited)::int8 as limited, sum(ranked_lane.running)::int8 as running,
        sum(ranked_lane.retrying)::int8 as retrying,
        sum(ranked_lane.future)::int8 as future, sum(ranked_lane.expired)::int8 as expired,
        min(ranked_lane.due_since) as due_since, min(ranked_lane.running_since) as running_since
    from ranked_lane
    group by 1, 2, ranked_lane.priority, ranked_lane.registered
),
unlisted as materialized (
    select
        count(distinct (ranked_lane.queue, ranked_lane.handler)) as lanes,
        count(distinct ranked_lane.queue) filter (
            where ranked_lane.queue not in (select listed.queue from ranked_lane as listed where listed.shown or listed.known)
        ) as queues
    from ranked_lane
    where not ranked_lane.shown
)
select
    result_row.queue, result_row.handler, result_row.priority, result_row.registered, result_row.due, result_row.limited,
    result_row.running, result_row.retrying, result_row.future, result_row.expired,
    case when result_row.due_since is not null then now() - greatest(result_row.due_since, timestamptz 'epoch') end as oldest_due,
    case
        when result_row.running_since is not null
        then now() - least(now(), greatest(result_row.running_since, timestamptz 'epoch'))
    end as oldest_running,
    not counting.is_exact as at_least,
    exists (select from found_lane where found_lane.step >= $2) as unexplored,
    unlisted.lanes as more_lanes, unlisted.queues as more_queues
from result_row
cross join counting
cross join unlisted
order by result_row.queue, result_row.handler, result_row.priority
