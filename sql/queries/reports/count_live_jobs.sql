-- Count the live jobs that cancel_jobs would cancel with the same filter.
--   $1 handler  text
--   $2 queue    text
--   $3 before   timestamptz
--   -> waiting int8, running int8
select
    count(*) filter (where job.state = 'scheduled') as waiting,
    count(*) filter (where job.state = 'running') as running
from rota.jobs as job
where ($1::text is null or job.handler = $1)
  and ($2::text is null or job.queue = $2)
  and ($3::timestamptz is null or job.run_at < $3)
