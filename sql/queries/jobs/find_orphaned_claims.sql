-- Find claims of node $1 that the node does not know, because the answer to its claim statement was lost.
--   $1 node_id  uuid
--   $2 known    int8[]   fence tokens of the claims that the node knows
--   -> job_id int8, fence_token int8
-- index: find_expired_leases_idx (0002)
select job.job_id, job.fence_token
from rota.jobs as job
where job.state = 'running'
  and job.leased_by = $1
  and job.fence_token <> all ($2::int8[])
