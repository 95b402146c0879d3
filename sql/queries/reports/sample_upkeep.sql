-- Read the metrics about pauses, snapshots, dead tuples, housekeeping and nodes. Reads no table of jobs.
--   $1 most  int8  number of paused queues, and of paused handlers, to return
--   -> kind text?, label text?, name text?, value float8?
--   kind  paused: label is queue or handler; oldest_snapshot: age in seconds; dead_tuples: per table, without partitions;
--         housekeeping: seconds since the last success of a task; nodes: number per state (running, draining, lost)
-- Snapshots of other logins' sessions are visible only to members of pg_read_all_stats or pg_monitor.
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
select 'oldest_snapshot', null, null, coalesce(extract(epoch from clock_timestamp() - min(snapshot.since)), 0)::float8
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
) as snapshot
union all
select 'dead_tuples', null, relation.relname::text, pg_stat_get_dead_tuples(relation.oid)::float8
from pg_catalog.pg_class as relation
where relation.relnamespace = 'rota'::regnamespace
  and relation.relkind = 'r'
  and not relation.relispartition
union all
select 'housekeeping', null, housekeeping.piece,
    (extract(epoch from now()) - extract(epoch from housekeeping.succeeded_at))::float8
from rota.housekeeping as housekeeping
union all
select 'nodes', null, node.state, count(*)::float8
from (
    select case when node.seen_at > now() - interval '15 seconds' then node.state else 'lost' end as state
    from rota.nodes as node
    where node.seen_at > now() - interval '1 day'
    union all
    select 'lost'
    from rota.lost_nodes as lost
    where lost.seen_at > now() - interval '1 day'
) as node
group by node.state
