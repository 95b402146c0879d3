-- Enqueue a job of a schedule now.
--   $1 name     text
--   $2 payload  text  JSON; null: the schedule's payload
--   $3 reason   text
--   -> job_id int8?
select rota.run_schedule_now($1, $2::text::jsonb, $3) as job_id
