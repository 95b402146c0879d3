-- Take daemons from the list that have not been seen for a minute: they died without saying so.
--   -> node_id uuid
delete from rota.nodes
where seen_at < now() - interval '1 minute'
returning node_id
