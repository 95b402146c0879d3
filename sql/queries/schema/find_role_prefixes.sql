-- Return the prefixes of the role sets to which sql/roles.sql has granted rights on this schema.
--   -> prefix text
select left(daemon.rolname, -7) as prefix
from pg_catalog.pg_namespace as namespace
cross join lateral pg_catalog.aclexplode(namespace.nspacl) as granted
join pg_catalog.pg_roles as daemon on daemon.oid = granted.grantee
where namespace.nspname = 'rota'
  and granted.privilege_type = 'USAGE'
  and daemon.rolname like '%\_daemon'
  and (
      select count(*)
      from pg_catalog.pg_roles as sister
      where sister.rolname in (left(daemon.rolname, -7) || '_owner', left(daemon.rolname, -7) || '_operator', left(daemon.rolname, -7) || '_client')
  ) = 3
order by prefix
