-- List the living nodes: those seen within 15 seconds.
--   -> node_id uuid, host text, pid int4, rota_version text, release text?, app text?, handlers text[], queues text[], slots text?, state text, tzdata text?, started_at timestamptz, up interval?, silent interval?
select
    node.node_id, node.host, node.pid, node.rota_version, node.release, node.app, node.handlers, node.queues,
    node.slots::text as slots, node.state, node.tzdata, node.started_at, now() - node.started_at as up,
    now() - node.seen_at as silent
from rota.nodes as node
where node.seen_at > now() - interval '15 seconds'
order by node.started_at, node.node_id
