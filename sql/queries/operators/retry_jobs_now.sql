-- Set the run_at of jobs that wait for a retry to now.
--   $1 handler  text
--   $2 queue    text
--   $3 limit    int4
--   $4 note     text
--   -> woken int8?
select rota.retry_now($1, $2, $3, $4) as woken
