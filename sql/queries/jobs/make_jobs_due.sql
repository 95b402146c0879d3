-- Set the run_at of some handlers' scheduled jobs to now. Only rota.testing uses this.
--   $1 handlers  text[]
update rota.jobs as job
set run_at = now()
where job.state <> 'running'
  and job.handler = any ($1)
  and job.run_at > now()
