-- List jobs, live or finished, newest first. A null filter matches everything.
--   $1 state        text         a state of rota.job_status
--   $2 handler      text
--   $3 queue        text
--   $4 schedule_id  int8
--   $5 since        timestamptz  compared with finished_at, or if it is running with started_at, else with run_at
--   $6 until        timestamptz  the same, exclusive
--   $7 limit        int8
--   $8 limit_key    text         finished jobs have none
--   -> job_id int8?, handler text?, queue text?, state text?, priority int2?, run_at timestamptz?, attempt int4?, max_attempts int4?, started_at timestamptz?, finished_at timestamptz?, last_error_kind text?, schedule_id int8?, schedule text?, limit_key text?, now timestamptz?
-- index: jobs_pkey (0002), dead_letters_pkey, job_runs_job_id_idx (0003)
-- The separate conditions on finished_at let the planner skip partitions of the ledger.
select
    status.job_id, status.handler, status.queue, status.state, status.priority, status.run_at, status.attempt,
    status.max_attempts, status.started_at, status.finished_at, status.last_error_kind, status.schedule_id,
    (select schedules.name from rota.schedules where schedules.schedule_id = status.schedule_id) as schedule, status.limit_key,
    now() as now
from rota.job_status as status
where ($1::text is null or status.state = $1)
  and ($2::text is null or status.handler = $2)
  and ($3::text is null or status.queue = $3)
  and ($4::int8 is null or status.schedule_id = $4)
  and ($5::timestamptz is null
       or (status.finished_at is null or status.finished_at >= $5)
       and coalesce(status.finished_at, case when status.state = 'running' then status.started_at end, status.run_at) >= $5)
  and ($6::timestamptz is null
       or (status.finished_at is null or status.finished_at < $6)
       and coalesce(status.finished_at, case when status.state = 'running' then status.started_at end, status.run_at) < $6)
  and ($8::text is null or status.limit_key = $8)
order by status.job_id desc
limit $7
