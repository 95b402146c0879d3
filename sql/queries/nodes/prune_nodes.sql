-- Move daemons that have not been seen for a minute to the lost ones, and forget lost ones after a day.
--   -> node_id uuid
-- index: prune_lost_nodes_idx (0015)
with gone as (
    delete from rota.nodes as node
    where node.seen_at < now() - interval '1 minute'
    returning
        node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers, node.queues, node.slots,
        node.tzdata, node.state, node.started_at, node.seen_at
),
lost as (
    insert into rota.lost_nodes as lost (
        node_id, host, pid, rota_version, release, app, handlers, queues, slots, tzdata, state, started_at, seen_at
    )
    select
        gone.node_id, gone.host, gone.pid, gone.rota_version, gone.release, gone.app, gone.handlers, gone.queues, gone.slots,
        gone.tzdata, gone.state, gone.started_at, gone.seen_at
    from gone
    where gone.seen_at > now() - interval '1 day'
    on conflict (node_id) do update
    set seen_at = excluded.seen_at
),
forgotten as (
    delete from rota.lost_nodes
    where seen_at < now() - interval '1 day'
)
select gone.node_id
from gone
