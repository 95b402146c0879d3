-- Count running jobs by node and queue.
--   -> node uuid?, queue text?, running int8?
-- index: find_expired_leases_idx (0002)
select job.leased_by as node, job.queue, count(*) as running
from (
    select jobs.leased_by, jobs.queue
    from rota.jobs
    where jobs.state = 'running'
    order by jobs.job_id
) as job
group by job.leased_by, job.queue
