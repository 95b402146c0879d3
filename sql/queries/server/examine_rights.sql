-- Find missing rights and settings that keep a connected daemon from reading or writing rota's tables.
--   -> kind text?, object text?, detail text?
--   kind    row_security (detail: the daemon's login to which it applies), trigger (detail: the trigger that is disabled),
--           replica_role (detail: the setting of this session), replica_identity (detail: the publication),
--           privilege (detail: what this login lacks)
with tables as materialized (
    select relation.oid, relation.relname, relation.relowner, relation.relrowsecurity, relation.relforcerowsecurity,
        relation.relreplident, relation.oid::regclass::text as name
    from pg_catalog.pg_class as relation
    where relation.relnamespace = 'rota'::regnamespace
      and relation.relkind in ('r', 'p')
      and not relation.relispartition
)
select 'row_security' as kind, tables.name as object, min(login.rolname)::text as detail
from tables
join pg_catalog.pg_roles as login
    on login.rolcanlogin
    and not login.rolsuper
    and not login.rolbypassrls
    and (tables.relforcerowsecurity or not pg_has_role(login.oid, tables.relowner, 'USAGE'))
    and (
        has_table_privilege(login.oid, to_regclass('rota.nodes'), 'INSERT')
        or login.rolname = session_user and has_table_privilege(login.oid, tables.oid, 'SELECT')
    )
where tables.relrowsecurity
group by tables.name
union all
select 'trigger', tables.name, trigger.tgname::text
from tables
join pg_catalog.pg_trigger as trigger on trigger.tgrelid = tables.oid and trigger.tgenabled in ('D', 'R')
join pg_catalog.pg_proc as function on function.oid = trigger.tgfoid and function.pronamespace = 'rota'::regnamespace
union all
select 'replica_role', session_user::text, current_setting('session_replication_role')
where current_setting('session_replication_role') = 'replica'
union all
select 'replica_identity', tables.name, min(published.pubname)::text
from tables
join pg_catalog.pg_publication_tables as published
    on published.schemaname = 'rota' and published.tablename = tables.relname
join pg_catalog.pg_publication as publication
    on publication.pubname = published.pubname and (publication.pubupdate or publication.pubdelete)
where tables.relreplident = 'n'
group by tables.name
union all
select 'privilege', 'rota.' || needed.relation, needed.privilege
from (
    values
        ('jobs', '{SELECT,INSERT,UPDATE,DELETE}'::text[]),
        ('dead_letters', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('attempts', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('cancel_requests', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('guards', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('nodes', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('schedules', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('schedule_definitions', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('schedule_clocks', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('fires', '{SELECT,INSERT,UPDATE,DELETE}'),
        ('job_runs', '{SELECT,INSERT}'),
        ('handlers', '{SELECT}'),
        ('queues', '{SELECT}'),
        ('meta', '{SELECT}')
) as wanted (relation, privileges)
cross join lateral (
    select wanted.relation, string_agg(each.privilege, ', ' order by each.ordinality) as privilege
    from unnest(wanted.privileges) with ordinality as each (privilege, ordinality)
    -- to_regclass() gives null for a table that is missing: other checks report that.
    where not has_table_privilege(to_regclass('rota.' || wanted.relation), each.privilege)
) as needed
where needed.privilege is not null
order by kind, object, detail
