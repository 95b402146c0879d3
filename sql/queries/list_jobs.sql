-- List jobs, newest first, wherever they stand. A filter that is null lets everything through.
--   $1 state    text   one of job_status
--   $2 handler  text
--   $3 queue    text
--   $4 limit    int8
--   -> job_id int8?, handler text?, queue text?, state text?, priority int2?, run_at timestamptz?, attempt int4?, max_attempts int4?, started_at timestamptz?, finished_at timestamptz?, last_error_kind text?, now timestamptz?
-- index: jobs_pkey (0002), dead_letters_pkey, job_runs_job_id_idx (0003)
select
    status.job_id, status.handler, status.queue, status.state, status.priority, status.run_at, status.attempt,
    status.max_attempts, status.started_at, status.finished_at, status.last_error_kind, now() as now
from rota.job_status as status
where ($1::text is null or status.state = $1)
  and ($2::text is null or status.handler = $2)
  and ($3::text is null or status.queue = $3)
order by status.job_id desc
limit $4
