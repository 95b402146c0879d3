-- Record the fence token for a resource, in the caller's transaction. Raises RT001 if a higher token was recorded before.
--   $1 resource     text
--   $2 fence_token  int8
select rota.guard(resource => $1, token => $2)
