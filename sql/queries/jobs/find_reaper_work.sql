-- Return whether the reaper has work of each kind, so that a sweep without work costs one statement. Locks nothing.
--   -> now timestamptz?, expired_leases bool?, missed_start_by bool?, cancel_requests bool?
-- index: find_expired_leases_idx, expire_unstarted_jobs_idx (0002), expire_unstarted_limited_jobs_idx (0012)
select
    clock_timestamp() as now,
    exists (
        select from rota.jobs as job
        where job.state = 'running'
          and job.lease_expires_at < now()
    ) as expired_leases,
    exists (
        select from rota.jobs as job
        where job.start_by is not null
          and job.state = 'scheduled'
          and job.fence_token is null
          and job.start_by <= now()
    ) or exists (
        select from rota.jobs as job
        where job.start_by is not null
          and job.state in ('waiting', 'limited')
          and job.fence_token is null
          and job.start_by <= now()
    ) as missed_start_by,
    exists (select from rota.cancel_requests) as cancel_requests
