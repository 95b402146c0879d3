-- Look whether there is anything to reap, to expire or to cancel, so that a sweep with nothing to do is one statement.
--   -> now timestamptz?, lost bool?, late bool?, asked bool?
-- now is the only clock that decides. Nothing is locked: what each of the three finds, the statement that writes finds again.
-- index: find_expired_leases_idx, expire_unstarted_jobs_idx (0002)
select
    clock_timestamp() as now,
    exists (
        select from rota.jobs as job
        where job.state = 'running'
          and job.lease_expires_at < now()
    ) as lost,
    exists (
        select from rota.jobs as job
        where job.start_by is not null
          and job.state = 'scheduled'
          and job.fence_token is null
          and job.start_by <= now()
    ) as late,
    exists (select from rota.cancel_requests) as asked
