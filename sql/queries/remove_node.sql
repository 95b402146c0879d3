-- Take this daemon from the list of the living.
--   $1 node_id  uuid
delete from rota.nodes
where node_id = $1
