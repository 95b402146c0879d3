-- Notify all dispatchers: a permit of a limit is free, and this node has no slot for the next job.
select rota.tell('rota_wake', '')
