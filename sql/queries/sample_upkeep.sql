-- Sample what slows a queue down or stops it: kind 'paused' ('queue' or 'handler', its name; $1 of each at most), 'oldest_snapshot'
-- (seconds), 'dead_tuples' (one of our tables, partitions apart). From catalogues and statistics: it reads no table of jobs.
--   $1 most  int8
--   -> kind text?, label text?, name text?, value float8?
-- A session of somebody else shows its snapshot only to members of pg_read_all_stats (or pg_monitor); to others, none is seen.
(
    select 'paused' as kind, 'queue' as label, queue.queue as name, 1::float8 as value
    from rota.queues as queue
    where queue.paused
    limit $1
)
union all
(
    select 'paused', 'handler', handler.handler, 1
    from rota.handlers as handler
    where handler.paused
    limit $1
)
union all
select 'oldest_snapshot', null, null, coalesce(extract(epoch from clock_timestamp() - min(held.since)), 0)::float8
from (
    select activity.xact_start as since
    from pg_catalog.pg_stat_activity as activity
    where activity.backend_xmin is not null
      and activity.datname = current_database()
      and activity.backend_type <> 'autovacuum worker'
      and activity.pid <> pg_backend_pid()
    union all
    select prepared.prepared
    from pg_catalog.pg_prepared_xacts as prepared
    where prepared.database = current_database()
) as held
union all
select 'dead_tuples', null, relation.relname::text, pg_stat_get_dead_tuples(relation.oid)::float8
from pg_catalog.pg_class as relation
where relation.relnamespace = 'rota'::regnamespace
  and relation.relkind = 'r'
  and not relation.relispartition
