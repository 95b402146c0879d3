-- Make the waiting jobs of some handlers due at once, whatever they wait for: for tests, never for a daemon.
--   $1 handlers  text[]
-- index: claim_due_jobs_idx (0002)
update rota.jobs as job
set run_at = now()
where job.state = 'scheduled'
  and job.handler = any ($1)
  and job.run_at > now()
