-- Read the payload of a running attempt of node $1. The claim leaves out payloads that are too large.
--   $1 node_id      uuid
--   $2 job_id       int8
--   $3 fence_token  int8
--   -> payload text
-- Returns no row if the node has lost the claim.
-- index: jobs_pkey (0002)
select job.payload::text as payload
from rota.jobs as job
where job.job_id = $2
  and job.fence_token = $3
  and job.leased_by = $1
