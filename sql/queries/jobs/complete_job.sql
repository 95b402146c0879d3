-- Settle an attempt as succeeded in the caller's transaction. Raises RT001 if the claim is stale.
--   $1 job_id       int8
--   $2 fence_token  int8
--   $3 result       text   JSON, or null
select rota.complete(job_id => $1, fence_token => $2, result => $3::pg_catalog.text::pg_catalog.jsonb)
