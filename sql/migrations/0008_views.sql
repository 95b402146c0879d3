-- Views for people: one row per job, live or ended, without its payload, and one row per fire.
-- Breaks older daemons: before this schema there was no release.

-- The states are finer than those of rota.jobs, which are scheduled and running.
-- The select lists have subqueries instead of joins: a column that a query does not select costs nothing, and a condition on job_id
-- can use the index of each of the three tables.
create view rota.job_status as
select job_id, handler, queue,
    case when state = 'running' then 'running'
         when run_at <= now() then 'due'
         when attempt > 0 then 'retrying'
         else 'future' end as state,
    priority, run_at, scheduled_for, attempt, max_attempts, unique_key, schedule_id, created_at, created_by, started_at,
    null::timestamptz as finished_at, leased_by as node, fence_token, lease_expires_at,
    exists (select from rota.cancel_requests where cancel_requests.job_id = jobs.job_id) as cancel_requested,
    (select attempts.error_kind from rota.attempts where attempts.job_id = jobs.job_id
     order by attempts.fence_token desc limit 1) as last_error_kind,
    progress, progress_note, meta, null::jsonb as result, null::text as note
from rota.jobs
union all
select job_id, handler, queue, 'dead', priority, run_at, scheduled_for, attempt, max_attempts, unique_key, schedule_id,
    created_at, created_by, started_at, finished_at, node, fence_token, null, false, error_kind, progress, progress_note, meta,
    null, reason
from rota.dead_letters
union all
select job_id, handler, queue, outcome, null, null, scheduled_for, attempts, null, unique_key, schedule_id,
    null, null, started_at, finished_at, node, fence_token, null, false,
    (select attempts.error_kind from rota.attempts where attempts.job_id = job_runs.job_id
     order by attempts.fence_token desc limit 1),
    null, null, meta, result, note
from rota.job_runs;
comment on view rota.job_status is
    'Every job, live or ended. state: future, due, retrying, running, succeeded, dead, discarded, cancelled or expired.';

create view rota.fire_history as
select schedule_id, name, scheduled_for, disposition, decided_at, decided_at - scheduled_for as lateness, job_id,
    (select state from rota.job_status where job_status.job_id = fires.job_id limit 1) as job_state,
    missed_from, missed_count, note
from rota.fires;
comment on view rota.fire_history is
    'The decision about each due instant of each schedule, and the state of its job (NULL: no job, or no longer in the ledger).';
