-- Return each connection limit that applies to this login, and how many connections are open under it.
--   -> scope text?, allowed int8?, used int8?
select
    'the server' as scope,
    current_setting('max_connections')::int8 - current_setting('superuser_reserved_connections')::int8
        - coalesce(current_setting('reserved_connections', true), '0')::int8 as allowed,
    (select sum(numbackends)::int8 from pg_catalog.pg_stat_database) as used
union all
select 'the database ' || base.datname, base.datconnlimit, pg_stat_get_db_numbackends(base.oid)
from pg_catalog.pg_database as base
where base.datname = current_database()
  and base.datconnlimit >= 0
union all
select
    'the login ' || login.rolname, login.rolconnlimit,
    (select count(*) from pg_catalog.pg_stat_activity as activity where activity.usesysid = login.oid)
from pg_catalog.pg_roles as login
where login.rolname = session_user
  and login.rolconnlimit >= 0
