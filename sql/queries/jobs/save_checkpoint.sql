-- Store the checkpoint of an attempt, which the job's next attempt reads.
--   $1 node_id      uuid
--   $2 job_id       int8
--   $3 fence_token  int8
--   $4 checkpoint   text   JSON
--   -> job_id int8         no row: the claim is stale
-- index: jobs_pkey (0002)
update rota.jobs as job
set checkpoint = $4::pg_catalog.text::pg_catalog.jsonb
where job.job_id operator(pg_catalog.=) $2
  and job.fence_token operator(pg_catalog.=) $3
  and job.leased_by operator(pg_catalog.=) $1
returning job.job_id
