-- Look at the server for what makes a queue on it slow or unsafe.
--   -> version text?, read_only bool?, pid int4?, clock timestamptz?, autovacuum bool?, snapshot_age interval?, snapshot_owner text?, prepared_age interval?, user_name text?
-- A session of somebody else shows its snapshot only to members of pg_read_all_stats (or pg_monitor); to others, none is seen.
select
    current_setting('server_version') as version,
    pg_is_in_recovery() or current_setting('transaction_read_only')::bool as read_only,
    pg_backend_pid() as pid,
    clock_timestamp() as clock,
    current_setting('autovacuum')::bool
        and not exists (
            select from pg_catalog.pg_class as relation
            where relation.oid = to_regclass('rota.jobs')
              and relation.reloptions && array['autovacuum_enabled=false', 'autovacuum_enabled=off', 'autovacuum_enabled=0']
        ) as autovacuum,
    oldest.age as snapshot_age,
    oldest.owner as snapshot_owner,
    (select max(clock_timestamp() - prepared) from pg_catalog.pg_prepared_xacts) as prepared_age,
    session_user::text as user_name
from (select) as always
left join lateral (
    select
        clock_timestamp() - activity.xact_start as age,
        'pid ' || activity.pid || coalesce(', ' || activity.usename, '')
            || coalesce(', ' || nullif(activity.application_name, ''), '') || coalesce(', ' || activity.state, '') as owner
    from pg_catalog.pg_stat_activity as activity
    where activity.backend_xmin is not null
      and activity.pid <> pg_backend_pid()
    order by activity.xact_start
    limit 1
) as oldest on true
