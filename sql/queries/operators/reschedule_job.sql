-- Change the run_at of a scheduled job to $2, or if that is null to $3 from now, or if both are null to now.
--   $1 job_id  int8
--   $2 run_at  timestamptz
--   $3 delay   interval
--   $4 note    text
--   -> run_at timestamptz?
select rota.reschedule($1, coalesce($2, now() + $3), $4) as run_at
