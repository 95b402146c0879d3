-- Find the sessions that block one session, or any session of rota in this database, with a lock.
--   $1 pid        int4       the waiting session; null: every session whose application_name begins with "rota ", of daemons' logins
--   $2 at_least   interval   report only waits of at least this length
--   -> waited float8?, object text?, pid int4?, user_name text?, application text?
--   waited  longest wait for this session, in seconds
--   object  name of the locked table, or "a row"
--   pid     0 if the lock belongs to a prepared transaction
-- If the blocking session itself waits for another one, the last session of that chain is returned.
-- Every login may read pg_locks, and pid, user and application_name of other logins' sessions.
-- Any login may name its session "rota …" and wait for a lock. Only daemons may insert into rota.nodes.
with recursive waiting as materialized (
    select lock.pid, max(clock_timestamp() - lock.waitstart) as waited, max(lock.relation::regclass::text) as object
    from pg_catalog.pg_locks as lock
    where not lock.granted
      and lock.waitstart is not null
    group by lock.pid
),
chain as (
    select waiting.pid, waiting.pid as blocked, 0 as depth
    from waiting
    join pg_catalog.pg_stat_activity as activity on activity.pid = waiting.pid
    where waiting.waited >= $2
      and (activity.pid = $1 or $1 is null and activity.datname = current_database() and activity.application_name like 'rota %'
           and has_table_privilege(activity.usesysid, (
               select relation.oid
               from pg_catalog.pg_class as relation
               where relation.relname = 'nodes'
                 and relation.relnamespace = (select schema.oid from pg_catalog.pg_namespace as schema where schema.nspname = 'rota')
           ), 'insert'))
    union
    select ahead.pid, chain.blocked, chain.depth + 1
    from chain
    cross join lateral unnest(pg_blocking_pids(chain.pid)) as ahead (pid)
    where chain.depth < 8
)
select
    extract(epoch from max(blocked.waited))::float8 as waited,
    coalesce(max(blocked.object), 'a row') as object,
    chain.pid,
    max(activity.usename)::text as user_name,
    max(activity.application_name) as application
from chain
join waiting as blocked on blocked.pid = chain.blocked
left join pg_catalog.pg_stat_activity as activity on activity.pid = chain.pid
where chain.depth > 0
  and chain.pid not in (select waiting.pid from waiting)
group by chain.pid
order by waited desc, chain.pid
limit 10
