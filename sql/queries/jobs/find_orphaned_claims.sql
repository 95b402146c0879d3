-- Find claims of node $1 that it doesn't know of: the answer to the claim was lost.
--   $1 node_id  uuid
--   $2 known    int8[]   fence tokens of what it holds
--   -> job_id int8, fence_token int8
-- index: find_expired_leases_idx (0002)
select job.job_id, job.fence_token
from rota.jobs as job
where job.state = 'running'
  and job.leased_by = $1
  and job.fence_token <> all ($2::int8[])
