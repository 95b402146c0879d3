-- Cancel a job, or request cancellation if it is running.
--   $1 job_id  int8
--   $2 force   bool
--   $3 note    text
--   -> became text?  cancelled, requested or finished
select rota.cancel($1, $2, $3) as became
