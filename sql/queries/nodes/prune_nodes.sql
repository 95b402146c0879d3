-- Move nodes that were not seen for a minute to rota.lost_nodes, and delete lost nodes after a day.
--   -> node_id uuid
-- index: prune_lost_nodes_idx (0001)
with removed_nodes as (
    delete from rota.nodes as node
    where node.seen_at < now() - interval '1 minute'
    returning
        node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers, node.queues, node.slots,
        node.tzdata, node.state, node.started_at, node.seen_at
),
lost_nodes_recorded as (
    insert into rota.lost_nodes (
        node_id, host, pid, rota_version, release, app, handlers, queues, slots, tzdata, state, started_at, seen_at
    )
    select
        node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers,
        node.queues, node.slots, node.tzdata, node.state, node.started_at, node.seen_at
    from removed_nodes as node
    where node.seen_at > now() - interval '1 day'
    on conflict (node_id) do update
    set seen_at = excluded.seen_at
),
old_lost_nodes_deleted as (
    delete from rota.lost_nodes
    where seen_at < now() - interval '1 day'
)
select node.node_id
from removed_nodes as node
