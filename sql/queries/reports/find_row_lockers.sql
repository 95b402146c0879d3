-- Find the session whose open transaction has a live job's row locked, or has changed it.
--   $1 job_id  int8
--   -> pid int4?, user_name text?, application text?
-- index: jobs_pkey (0002)
-- xmax of a row that nothing holds names a transaction that has ended, and so has no lock. Not found: several sessions that share
-- the row's lock, as foreign keys of the user's own tables do; xmax then names no transaction.
select lock.pid, activity.usename::text as user_name, activity.application_name as application
from rota.jobs as job
join pg_catalog.pg_locks as lock
    on lock.locktype = 'transactionid' and lock.transactionid = job.xmax and lock.granted
left join pg_catalog.pg_stat_activity as activity on activity.pid = lock.pid
where job.job_id = $1
limit 1
