-- Set the run_at of some handlers' scheduled jobs to now. Only rota.testing uses this.
--   $1 handlers  text[]
-- index: claim_due_jobs_idx (0002)
update rota.jobs as job
set run_at = now()
where job.state = 'scheduled'
  and job.handler = any ($1)
  and job.run_at > now()
