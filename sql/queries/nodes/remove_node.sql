-- Take this daemon from the list of the living, and tell the others, who look after its schedules from now on.
--   $1 node_id  uuid
with gone as (
    delete from rota.nodes
    where node_id = $1
    returning node_id
)
select rota.tell('rota_wake', 'nodes')
from gone
