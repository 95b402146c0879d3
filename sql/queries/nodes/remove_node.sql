-- Delete this node and notify the others, which take over its shards of schedules.
--   $1 node_id  uuid
with removed_node as (
    delete from rota.nodes
    where node_id = $1
    returning node_id
)
select rota.tell('rota_wake', 'nodes')
from removed_node
