-- Make a waiting job due at another instant: $2, or in $3 from now, or now.
--   $1 job_id  int8
--   $2 run_at  timestamptz
--   $3 delay   interval
--   $4 note    text
--   -> run_at timestamptz?
select rota.reschedule($1, coalesce($2, now() + $3), $4) as run_at
