-- Count the live jobs by queue, handler and priority (a lane), at a bounded cost at any number of jobs.
-- Up to $1 jobs are counted exactly. With more, the lanes are found in the index, and each is counted up to a share of $1.
-- At most $3 rows name a handler: first registered handlers in known queues, then those that have waited longest.
--   $1 counted   int8  most live jobs to count exactly; with more, counts are lower bounds (at_least)
--   $2 explored  int8  with more jobs, most lanes to find; lanes of registered handlers are found in any case
--   $3 shown     int8  most rows with a handler; other lanes are added up in rows without one, by queue if daemons serve it
--   -> queue text?, handler text?, priority int2?, registered bool?, due int8?, running int8?, retrying int8?, future int8?, expired int8?, oldest_due interval?, oldest_running interval?, at_least bool?, unexplored bool?, more_lanes int8?, more_queues int8?
--   unexplored               there are more lanes than were found
--   more_lanes, more_queues  number of lanes in the rows without a handler, and of queues in the rows without a queue
-- index: jobs_pkey, claim_due_jobs_idx, find_expired_leases_idx (0002)
-- Ages, running and expired jobs are exact at any size: they come from the first entries of claim_due_jobs_idx, and from all of
-- find_expired_leases_idx, which holds only running jobs.
-- The limits have an order, because a scan without one may start anywhere in the table.
-- Instants are clamped to the years from 1970 to now, so that no subtraction can overflow.
with recursive counted as materialized (
    select job.queue, job.handler, job.priority, job.run_at, job.created_at, job.attempt, job.state
    from rota.jobs as job
    order by job.job_id
    limit $1::int8 + 1
),
small as materialized (
    select count(*) <= $1 as size from counted
),
-- A loose index scan: each step is one probe for the first entry of the next (queue, handler, suspects, priority).
found (queue, handler, suspects, priority, run_at, created_at, step) as (
    (
        select job.queue, job.handler, job.losses / 2, job.priority, job.run_at, job.created_at, 1
        from rota.jobs as job
        where job.state = 'scheduled'
          and not (select small.size from small)
        order by job.queue, job.handler, (job.losses / 2), job.priority, job.run_at
        limit 1
    )
    union all
    select following.queue, following.handler, following.suspects, following.priority, following.run_at, following.created_at,
        found.step + 1
    from found
    cross join lateral (
        select job.queue, job.handler, job.losses / 2 as suspects, job.priority, job.run_at, job.created_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and (job.queue, job.handler, (job.losses / 2), job.priority)
            > (found.queue, found.handler, found.suspects, found.priority)
        order by job.queue, job.handler, (job.losses / 2), job.priority, job.run_at
        limit 1
    ) as following
    where found.step < $2::int8
),
-- If the scan stopped early, the lanes of registered handlers after that point are probed one by one.
registered as materialized (
    select handler.handler, coalesce(handler.queue, 'default') as queue
    from rota.handlers as handler
    where handler.seen_at is not null
    order by handler.seen_at desc
    limit 1000
),
served as materialized (
    select distinct node_queue.queue
    from rota.nodes as node
    cross join lateral unnest(node.queues) as node_queue (queue)
    where node.seen_at > now() - interval '15 seconds'
),
probed as materialized (
    select head.queue, head.handler, head.suspects, head.priority, head.run_at, head.created_at
    from (
        select pair.queue, pair.handler
        from (
            select registered.queue, registered.handler from registered
            union
            select served.queue, registered.handler from served cross join registered
        ) as pair
        where exists (select from found where found.step >= $2)
          and (pair.queue, pair.handler) >= (select last.queue, last.handler from found as last where last.step >= $2)
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
    ) as head
),
head as materialized (
    select found.queue, found.handler, found.suspects, found.priority, found.run_at, found.created_at from found
    union
    select probed.queue, probed.handler, probed.suspects, probed.priority, probed.run_at, probed.created_at from probed
),
share as materialized (
    select greatest(10, $1 / greatest(1, count(*)) / 2) as most from head
),
waiting as (
    select
        counted.queue, counted.handler, counted.priority, count(*) filter (where counted.run_at <= now()) as due,
        count(*) filter (where counted.run_at > now() and counted.attempt > 0) as retrying,
        count(*) filter (where counted.run_at > now() and counted.attempt = 0) as future,
        min(greatest(counted.run_at, counted.created_at)) filter (where counted.run_at <= now()) as due_since
    from counted
    where counted.state = 'scheduled'
      and (select small.size from small)
    group by counted.queue, counted.handler, counted.priority
    union all
    select head.queue, head.handler, head.priority, due.jobs, later.retrying, later.jobs - later.retrying, due.since
    from head
    cross join lateral (
        -- A job inserted with a run_at in the past has waited only since its creation, so the oldest run_at alone is not enough.
        select count(*) as jobs, min(greatest(job.run_at, job.created_at)) as since
        from (
            select job.run_at, job.created_at
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = head.queue
              and job.handler = head.handler
              and (job.losses / 2) = head.suspects
              and job.priority = head.priority
              and job.run_at <= now()
            order by job.run_at
            limit (select share.most from share)
        ) as job
    ) as due
    cross join lateral (
        select count(*) as jobs, count(*) filter (where job.attempt > 0) as retrying
        from (
            select job.attempt
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = head.queue
              and job.handler = head.handler
              and (job.losses / 2) = head.suspects
              and job.priority = head.priority
              and job.run_at > now()
            order by job.run_at
            limit (select share.most from share)
        ) as job
    ) as later
),
running as (
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
        part.queue in (select served.queue from served union select registered.queue from registered) as known,
        sum(part.due)::int8 as due, sum(part.running)::int8 as running, sum(part.retrying)::int8 as retrying,
        sum(part.future)::int8 as future, sum(part.expired)::int8 as expired, min(part.due_since) as due_since,
        min(part.running_since) as running_since
    from (
        select
            waiting.queue, waiting.handler, waiting.priority, waiting.due, 0 as running, waiting.retrying, waiting.future,
            0 as expired, waiting.due_since, null::timestamptz as running_since
        from waiting
        union all
        select running.queue, running.handler, running.priority, 0, running.running, 0, 0, running.expired, null,
            running.running_since
        from running
    ) as part
    group by part.queue, part.handler, part.priority
),
ranked as materialized (
    select
        lane.*,
        row_number() over (
            order by
                lane.registered and lane.known desc, lane.registered desc, lane.known desc, lane.due_since nulls last,
                lane.queue, lane.handler, lane.priority
        ) <= $3 as shown
    from lane
),
line as (
    select
        case when ranked.shown or ranked.known then ranked.queue end as queue,
        case when ranked.shown then ranked.handler end as handler,
        ranked.priority, ranked.registered,
        sum(ranked.due)::int8 as due, sum(ranked.running)::int8 as running, sum(ranked.retrying)::int8 as retrying,
        sum(ranked.future)::int8 as future, sum(ranked.expired)::int8 as expired,
        min(ranked.due_since) as due_since, min(ranked.running_since) as running_since
    from ranked
    group by 1, 2, ranked.priority, ranked.registered
),
hidden as materialized (
    select
        count(distinct (ranked.queue, ranked.handler)) as lanes,
        count(distinct ranked.queue) filter (
            where ranked.queue not in (select listed.queue from ranked as listed where listed.shown or listed.known)
        ) as queues
    from ranked
    where not ranked.shown
)
select
    line.queue, line.handler, line.priority, line.registered, line.due, line.running, line.retrying, line.future, line.expired,
    case when line.due_since is not null then now() - greatest(line.due_since, timestamptz 'epoch') end as oldest_due, case
        when line.running_since is not null then now() - least(now(), greatest(line.running_since, timestamptz 'epoch'))
    end as oldest_running,
    not small.size as at_least,
    exists (select from found where found.step >= $2) as unexplored,
    hidden.lanes as more_lanes, hidden.queues as more_queues
from line
cross join small
cross join hidden
order by line.queue, line.handler, line.priority
