-- List the queues that have scheduled jobs, one index probe each.
--   $1 after  text  those whose names come after this one
--   $2 limit  int8
--   -> queue text?
-- index: claim_due_jobs_idx (0002)
with recursive found as (
    (
        select job.queue
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue > $1
        order by job.queue
        limit 1
    )
    union all
    select (
        select job.queue
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue > found.queue
        order by job.queue
        limit 1
    )
    from found
    where found.queue is not null
)
select found.queue
from found
where found.queue is not null
limit $2
