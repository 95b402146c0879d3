-- Find the session whose open transaction has locked or changed the row of a live job or of a schedule's clock.
--   $1 job_id       int8  null: no job
--   $2 schedule_id  int8  null: no schedule
--   -> pid int4?, user_name text?, application text?
-- index: jobs_pkey (0002), schedule_clocks_pkey (0005)
-- xmax is the transaction that last locked the row. If that has ended, it has no entry in pg_locks. Several sessions that share
-- the row's lock (through foreign keys of the user's tables) are not found: xmax is then a multixact, not a transaction.
select lock.pid, activity.usename::text as user_name, activity.application_name as application
from (
    select job.xmax as holder
    from rota.jobs as job
    where job.job_id = $1
    union all
    select clock.xmax
    from rota.schedule_clocks as clock
    where clock.schedule_id = $2
) as locked_row
join pg_catalog.pg_locks as lock
    on lock.locktype = 'transactionid' and lock.transactionid = locked_row.holder and lock.granted
left join pg_catalog.pg_stat_activity as activity on activity.pid = lock.pid
limit 1
