-- Find the jobs that a claim of these lanes would try first. Locks nothing.
--   $1 queues      text[]         $1 to $4 are the lanes: the queue of each lane,
--   $2 handlers    text[]         its handler,
--   $3 priorities  int2[]         its priority,
--   $4 floors      timestamptz[]  and the run_at to start from
--   $5 suspects    int4           as in claim_due_jobs
--   $6 skipped     int8[]         job_ids to leave out
--   $7 limit       int8           limit for each lane, and for all lanes together
--   -> job_id int8, queue text, handler text, priority int2, schedule_id int8?
-- index: claim_due_jobs_idx (0002)
select due.job_id, lane.queue, lane.handler, lane.priority, due.schedule_id
from unnest($1::text[], $2::text[], $3::int2[], $4::timestamptz[]) as lane (queue, handler, priority, floor)
cross join lateral (
    select job.job_id, job.run_at, job.schedule_id
    from rota.jobs as job
    where job.state = 'scheduled'
      and job.queue = lane.queue
      and job.handler = lane.handler
      and (job.losses / 2) = least($5, 1)
      and job.priority = lane.priority
      and job.run_at >= lane.floor
      and job.run_at <= now()
      and job.job_id <> all ($6::int8[])
    order by job.run_at
    limit $7
) as due
order by lane.priority, due.run_at
limit $7
