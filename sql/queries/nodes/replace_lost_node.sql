-- Delete the entry of node $1 from the lost nodes, because it is alive. If it has just started, also delete one lost node of the
-- same host and app, which it replaces. It can only replace a node that was last seen before this one started.
--   $1 node_id  uuid
--   $2 host     text
--   $3 app      text
--   $4 started  bool  whether the node has just started; false: delete only its own entry
--   -> replaced int8?
with own_entry as (
    delete from rota.lost_nodes
    where node_id = $1
    returning 1
),
silent_node as (
    delete from rota.nodes as node
    where node.ctid = any (array(
        select silent.ctid
        from rota.nodes as silent
        where $4
          and silent.host = $2
          and silent.app = $3
          and silent.node_id <> $1
          and silent.seen_at < now() - interval '15 seconds'
          and silent.seen_at < (select own.started_at from rota.nodes as own where own.node_id = $1)
        order by silent.seen_at desc
        limit 1
        for update skip locked
    ))
    returning 1
),
lost_node as (
    delete from rota.lost_nodes as node
    where node.ctid = any (array(
        select lost_node.ctid
        from rota.lost_nodes as lost_node
        where $4
          and lost_node.host = $2
          and lost_node.app = $3
          and lost_node.node_id <> $1
          and lost_node.seen_at < (select own.started_at from rota.nodes as own where own.node_id = $1)
          and not exists (select from silent_node)
        order by lost_node.seen_at desc
        limit 1
        for update skip locked
    ))
    returning 1
)
select (select count(*) from own_entry) + (select count(*) from silent_node) + (select count(*) from lost_node) as replaced
