-- Extend the leases of what runs on node $1, and say which are still its own.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   $4 grace         interval   beyond a job's timeout, for writing down how it ended
--   -> fence_token int8?, extended bool?, cancel_requested bool?
-- A token that does not come back is lost. One that comes back unextended is locked by somebody and is tried again.
-- index: jobs_pkey (0002)
-- Locking inside a lateral subquery keeps the planner on the primary key, whatever its statistics say. Without the offset,
-- each row is looked up three times.
with attempt as materialized (
    select attempt.job_id, attempt.fence_token
    from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
    order by attempt.job_id
),
held as materialized (
    select job.job_id
    from attempt
    cross join lateral (
        select jobs.job_id
        from rota.jobs
        where jobs.job_id = attempt.job_id
          and jobs.fence_token = attempt.fence_token
          and jobs.leased_by = $1
        for update skip locked
    ) as job
),
extended as (
    update rota.jobs as job
    set lease_expires_at = greatest(
        job.lease_expires_at,
        least(clock_timestamp() + job.lease, job.started_at + job.timeout + $4)
    )
    where job.job_id = any (array(select held.job_id from held))
    returning job.fence_token
)
select
    mine.fence_token,
    mine.fence_token in (select extended.fence_token from extended) as extended,
    (select true from rota.cancel_requests as request where request.job_id = mine.job_id) is not null as cancel_requested
from (
    select
        attempt.job_id,
        (
            select jobs.fence_token
            from rota.jobs
            where jobs.job_id = attempt.job_id
              and jobs.fence_token = attempt.fence_token
              and jobs.leased_by = $1
        ) as fence_token
    from attempt
    offset 0
) as mine
where mine.fence_token is not null
