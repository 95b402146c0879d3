-- Count running jobs by node, queue and handler.
--   -> node uuid?, queue text?, handler text?, running int8?
-- index: find_expired_leases_idx (0002)
select job.leased_by as node, job.queue, job.handler, count(*) as running
from (
    select jobs.leased_by, jobs.queue, jobs.handler
    from rota.jobs
    where jobs.state = 'running'
    order by jobs.job_id
) as job
group by job.leased_by, job.queue, job.handler
