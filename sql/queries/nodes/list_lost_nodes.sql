-- List daemons that vanished without saying goodbye within a day, the last ones first, with their number.
--   $1 limit  int8
--   -> node_id uuid?, host text?, pid int4?, rota_version text?, release text?, app text?, handlers text[]?, seen_at timestamptz?, silent interval?, lost int8?
-- index: prune_lost_nodes_idx (0015)
select
    node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers, node.seen_at,
    now() - node.seen_at as silent, count(*) over () as lost
from (
    select
        gone.node_id, gone.host, gone.pid, gone.rota_version, gone.release, gone.app, gone.handlers, gone.seen_at
    from rota.lost_nodes as gone
    where gone.seen_at > now() - interval '1 day'
    union all
    select
        silent.node_id, silent.host, silent.pid, silent.rota_version, silent.release, silent.app, silent.handlers, silent.seen_at
    from rota.nodes as silent
    where silent.seen_at <= now() - interval '15 seconds'
      and silent.seen_at > now() - interval '1 day'
) as node
order by node.seen_at desc, node.node_id
limit $1
