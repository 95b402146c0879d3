-- List the queues that have scheduled jobs, and which of these handlers have one there. Costs a few index probes per queue.
--   $1 after     text    only names after this one
--   $2 limit     int8
--   $3 handlers  text[]
--   -> queue text?, handlers text[]?
-- index: claim_due_jobs_idx (0002)
with recursive queue_name as (
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
          and job.queue > queue_name.queue
        order by job.queue
        limit 1
    )
    from queue_name
    where queue_name.queue is not null
)
select
    queue_name.queue,
    array(
        select served.handler
        from unnest($3::text[]) as served (handler)
        where exists (
            select from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = queue_name.queue
              and job.handler = served.handler
        )
    ) as handlers
from queue_name
where queue_name.queue is not null
limit $2
