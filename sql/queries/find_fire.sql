-- Find the row that tells of one instant of a schedule: its own, else that of the stretch it is in.
--   $1 schedule_id  int8  null: of a schedule that is gone, by its name
--   $2 name         text
--   $3 at           timestamptz
--   -> schedule_id int8?, name text?, scheduled_for timestamptz?, disposition text?, decided_at timestamptz?, job_id int8?, job_state text?, missed_from timestamptz?, missed_count int4?, note text?
select
    fire.schedule_id, fire.name, fire.scheduled_for, fire.disposition, fire.decided_at, fire.job_id, fire.job_state,
    fire.missed_from, fire.missed_count, fire.note
from rota.fire_history as fire
where (fire.schedule_id = $1 or $1::int8 is null and fire.name = $2)
  and fire.scheduled_for >= $3
  and (fire.scheduled_for = $3 or fire.missed_from <= $3)
order by fire.scheduled_for
limit 1
