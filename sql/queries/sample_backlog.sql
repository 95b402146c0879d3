-- Sample the whole installation for the gauges: kind 'jobs' (queue, state), 'oldest_due' (queue, priority), 'dead' (queue),
-- 'oldest_running' (queue), 'oldest_dead', 'expired', and of due jobs that nobody would claim 'unclaimed' (queue, handler): the largest 20 lanes;
-- 'unclaimable': how many are of a handler that no living node has, 'unserved': in a queue that none who has it serves. Counts stop at $1 a group of rows looked at, so that a look never costs more.
--   $1 most  int8
--   -> kind text?, queue text?, label text?, value float8?
-- index: jobs_pkey (0002)
with live as materialized (
    select job.queue, job.priority, job.state, job.attempt, job.handler, job.run_at, job.created_at, job.started_at, job.lease_expires_at
    from rota.jobs as job
    limit $1
),
letter as materialized (
    select dead.queue, dead.finished_at
    from rota.dead_letters as dead
    limit $1
),
lane as materialized (
    select live.queue, live.handler, count(*) as jobs
    from live
    where live.state = 'scheduled'
      and live.run_at <= now()
    group by live.queue, live.handler
),
alive as materialized (
    select node.handlers, node.queues, node.slots, node.state
    from rota.nodes as node
    where node.seen_at > now() - interval '15 seconds'
),
judged as materialized (
    select
        lane.queue, lane.handler, lane.jobs,
        exists (select from alive where lane.handler = any (alive.handlers)) as known,
        exists (
            select from alive
            where lane.handler = any (alive.handlers)
              and alive.state = 'running'
              and alive.queues && array[lane.queue, '*']
              and coalesce(alive.slots ->> lane.queue, alive.slots ->> '*') is distinct from '0'
        ) as served
    from lane
)
select 'jobs' as kind, live.queue,
    case
        when live.state = 'running' then 'running'
        when live.run_at <= now() then 'due'
        when live.attempt > 0 then 'retrying'
        else 'future'
    end as label,
    count(*)::float8 as value
from live
group by 2, 3
union all
select 'oldest_due', live.queue, live.priority::text,
    max(extract(epoch from now() - greatest(live.run_at, live.created_at)))::float8
from live
where live.state = 'scheduled'
  and live.run_at <= now()
group by 2, 3
union all
select 'oldest_running', live.queue, null, max(extract(epoch from now() - live.started_at))::float8
from live
where live.state = 'running'
  and live.started_at is not null
group by 2
union all
select 'dead', letter.queue, null, count(*)::float8
from letter
group by 2
union all
select 'oldest_dead', null, null, coalesce(extract(epoch from now() - min(letter.finished_at)), 0)::float8
from letter
union all
select 'expired', null, null, count(*)::float8
from live
where live.state = 'running'
  and live.lease_expires_at < now()
union all
select 'unclaimable', null, null, coalesce(sum(judged.jobs), 0)::float8
from judged
where not judged.known
union all
select 'unserved', null, null, coalesce(sum(judged.jobs), 0)::float8
from judged
where judged.known
  and not judged.served
union all
(
    select 'unclaimed', judged.queue, judged.handler, judged.jobs::float8
    from judged
    where not judged.served
    order by judged.jobs desc, judged.queue, judged.handler
    limit 20
)
