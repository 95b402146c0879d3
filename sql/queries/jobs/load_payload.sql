-- Read the payload of a running attempt of node $1, for which it was too large to come with the claim.
--   $1 node_id      uuid
--   $2 job_id       int8
--   $3 fence_token  int8
--   -> payload text
-- No row comes back when the claim is no longer the node's.
-- index: jobs_pkey (0002)
select job.payload::text as payload
from rota.jobs as job
where job.job_id = $2
  and job.fence_token = $3
  and job.leased_by = $1
