-- Return the properties of the server that can make queues slow or unsafe.
--   -> version text?, read_only bool?, pid int4?, clock timestamptz?, autovacuum bool?, snapshot_age interval?, snapshot_owner text?, prepared_age interval?, notifications float8?, user_name text?, may_run bool?, daemon_role text?
--   snapshot_age   age of the oldest transaction that holds a snapshot
--   notifications  fraction of the server's notification queue in use, 0 to 1
--   may_run        whether this login has the rights to run a daemon
--   daemon_role    the role that grants these rights; null if there is not exactly one
-- Snapshots of other logins' sessions are visible only to members of pg_read_all_stats or pg_monitor.
select
    current_setting('server_version') as version,
    pg_is_in_recovery() or current_setting('transaction_read_only')::bool as read_only,
    pg_backend_pid() as pid,
    clock_timestamp() as clock,
    current_setting('autovacuum')::bool as autovacuum,
    oldest.age as snapshot_age,
    oldest.owner as snapshot_owner,
    (select max(clock_timestamp() - prepared) from pg_catalog.pg_prepared_xacts) as prepared_age,
    pg_notification_queue_usage() as notifications,
    session_user::text as user_name,
    has_sequence_privilege('rota.fence_tokens', 'UPDATE') and has_table_privilege('rota.nodes', 'INSERT') as may_run,
    (
        select case when count(*) = 1 then min(granted.grantee::regrole::text) end
        from pg_catalog.pg_class as tokens
        cross join lateral aclexplode(tokens.relacl) as granted
        where tokens.oid = to_regclass('rota.fence_tokens')
          and granted.privilege_type = 'UPDATE'
          and granted.grantee not in (0, tokens.relowner)
    ) as daemon_role
from (select) as one_row
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
