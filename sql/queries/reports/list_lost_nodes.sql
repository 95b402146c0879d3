-- List nodes that stopped without deregistering within the last day, the latest first.
--   $1 limit  int8
--   -> node_id uuid?, host text?, pid int4?, rota_version text?, release text?, app text?, handlers text[]?, seen_at timestamptz?, silent interval?, lost int8?
--   lost  number of lost nodes without the limit
-- index: prune_lost_nodes_idx (0001)
select
    node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers, node.seen_at,
    now() - node.seen_at as silent, count(*) over () as lost
from (
    select
        lost_node.node_id, lost_node.host, lost_node.pid, lost_node.rota_version, lost_node.release, lost_node.app,
        lost_node.handlers, lost_node.seen_at
    from rota.lost_nodes as lost_node
    where lost_node.seen_at > now() - interval '1 day'
    union all
    select
        silent.node_id, silent.host, silent.pid, silent.rota_version, silent.release, silent.app, silent.handlers,
        silent.seen_at
    from rota.nodes as silent
    where silent.seen_at <= now() - interval '15 seconds'
      and silent.seen_at > now() - interval '1 day'
) as node
order by node.seen_at desc, node.node_id
limit $1
