-- Find the session whose open transaction has the row of a live job or of a schedule's clock locked, or has changed it.
--   $1 job_id       int8  null: of no job
--   $2 schedule_id  int8  null: of no schedule
--   -> pid int4?, user_name text?, application text?
-- index: jobs_pkey (0002), schedule_clocks_pkey (0005)
-- xmax of a row that nothing holds names a transaction that has ended, and so has no lock. Not found: several sessions that share
-- the row's lock, as foreign keys of the user's own tables do; xmax then names no transaction.
select lock.pid, activity.usename::text as user_name, activity.application_name as application
from (
    select job.xmax as holder
    from rota.jobs as job
    where job.job_id = $1
    union all
    select clock.xmax
    from rota.schedule_clocks as clock
    where clock.schedule_id = $2
) as held
join pg_catalog.pg_locks as lock
    on lock.locktype = 'transactionid' and lock.transactionid = held.holder and lock.granted
left join pg_catalog.pg_stat_activity as activity on activity.pid = lock.pid
limit 1
