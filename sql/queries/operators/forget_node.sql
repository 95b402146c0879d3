-- Delete a lost node from rota.lost_nodes.
--   $1 node_id  uuid
--   $2 reason   text
--   -> forgotten bool?
select rota.forget_node($1, $2) as forgotten
