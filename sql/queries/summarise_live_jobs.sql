-- Count live jobs by queue and handler. Looks at $1 jobs at most, so that a look never costs more; then all counts are lower bounds.
--   $1 most  int8
--   -> queue text?, handler text?, due int8?, running int8?, retrying int8?, future int8?, expired int8?, oldest_due interval?
-- index: jobs_pkey (0002)
with live as materialized (
    select job.queue, job.handler, job.state, job.attempt, job.run_at, job.created_at, job.lease_expires_at
    from rota.jobs as job
    limit $1
)
select
    live.queue, live.handler,
    count(*) filter (where live.state = 'scheduled' and live.run_at <= now()) as due,
    count(*) filter (where live.state = 'running') as running,
    count(*) filter (where live.state = 'scheduled' and live.run_at > now() and live.attempt > 0) as retrying,
    count(*) filter (where live.state = 'scheduled' and live.run_at > now() and live.attempt = 0) as future,
    count(*) filter (where live.state = 'running' and live.lease_expires_at < now()) as expired,
    max(now() - greatest(live.run_at, live.created_at)) filter (where live.state = 'scheduled' and live.run_at <= now()) as oldest_due
from live
group by live.queue, live.handler
order by live.queue, live.handler
