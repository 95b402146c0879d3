-- Count the due jobs that are claimed before a given job, at most $6.
--   $1 queue     text
--   $2 handlers  text[]  handlers of the daemons that serve the queue; jobs of other handlers take no slot there
--   $3 priority  int2
--   $4 run_at    timestamptz
--   $5 job_id    int8
--   $6 limit     int8
--   -> ahead int8?
-- index: claim_due_jobs_idx (0002)
select count(*) as ahead
from (
    select lane.handler
    from unnest($2::text[]) as lane (handler)
    cross join generate_series(0, 1) as suspect (suspects)
    cross join generate_series(0, $3::int2::int4) as urgent (priority)
    cross join lateral (
        select
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = $1
          and job.handler = lane.handler
          and (job.losses / 2) = suspect.suspects
          and job.priority = urgent.priority
          and job.run_at <= now()
          and (urgent.priority < $3::int2 or job.run_at <= $4)
          and job.job_id <> $5
        order by job.run_at
        limit $6
    ) as ahead
    limit $6
) as job
