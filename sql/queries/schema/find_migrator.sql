-- Return the session that holds the row lock of a running migration.
--   -> pid int4?, user_name text?, application text?
select lock.pid, activity.usename::text as user_name, activity.application_name as application
from rota.migrations as migration
join pg_catalog.pg_locks as lock
    on lock.locktype = 'transactionid' and lock.transactionid = migration.xmax and lock.granted
left join pg_catalog.pg_stat_activity as activity on activity.pid = lock.pid
where migration.version = 1
