-- Delete a batch of audit rows older than $1.
--   $1 keep   interval
--   $2 limit  int4
--   -> pruned int8?
-- index: prune_audit_idx (0001)
select rota.prune_audit(keep => $1, "limit" => $2) as pruned
