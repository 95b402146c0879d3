-- Extend the leases of the jobs that run on node $1. Returns which claims the node still has.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   $4 grace         interval   how far a lease may reach beyond the job's timeout, to leave time for settling it
--   -> fence_token int8?, extended bool?, cancel_requested bool?
-- A token that is not returned is lost. If extended is false, another session has the row locked: try again.
-- If it is null, a trigger dropped the change.
-- index: jobs_pkey (0002)
-- The lock is taken in a lateral subquery, so that the planner uses the primary key whatever its statistics say. `offset 0` keeps
-- the planner from looking up each row three times.
with attempt as materialized (
    select attempt.job_id, attempt.fence_token
    from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
    order by attempt.job_id
),
locked_jobs as materialized (
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
extended_jobs as (
    update rota.jobs as job
    set lease_expires_at = greatest(
        job.lease_expires_at,
        least(clock_timestamp() + job.lease, job.started_at + job.timeout + $4)
    )
    where job.job_id = any (array(select locked_jobs.job_id from locked_jobs))
    returning job.fence_token
)
select
    owned.fence_token,
    case
        when owned.fence_token in (select extended_jobs.fence_token from extended_jobs) then true
        when owned.job_id not in (select locked_jobs.job_id from locked_jobs) then false
    end as extended,
    (select true from rota.cancel_requests as request where request.job_id = owned.job_id) is not null as cancel_requested
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
) as owned
where owned.fence_token is not null
