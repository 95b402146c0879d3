-- Store the progress of an attempt.
--   $1 node_id      uuid
--   $2 job_id       int8
--   $3 fence_token  int8
--   $4 progress     float4   0 to 1
--   $5 note         text
--   -> job_id int8           no row: the claim is stale
-- index: jobs_pkey (0002)
update rota.jobs as job
set progress = $4,
    progress_note = left($5, 500)
where job.job_id = $2
  and job.fence_token = $3
  and job.leased_by = $1
returning job.job_id
