-- Find the fire that created a job.
--   $1 job_id         int8
--   $2 schedule_id    int8
--   $3 scheduled_for  timestamptz
--   -> schedule_id int8?, name text?, scheduled_for timestamptz?, disposition text?, decided_at timestamptz?, job_id int8?, job_state text?, missed_from timestamptz?, missed_count int4?, note text?
-- index: fires_pkey (0005)
select
    fire.schedule_id, fire.name, fire.scheduled_for, fire.disposition, fire.decided_at, fire.job_id, fire.job_state,
    fire.missed_from, fire.missed_count, fire.note
from rota.fire_history as fire
where fire.scheduled_for = $3
  and fire.schedule_id = $2
  and fire.job_id = $1
