-- Take a daemon that vanished from the list of the lost.
--   $1 node_id  uuid
--   $2 reason   text
--   -> forgotten bool?
select rota.forget_node($1, $2) as forgotten
