-- Order effects on a resource by fence token, in the caller's transaction; raises RT001 for a token lower than one seen.
--   $1 resource     text
--   $2 fence_token  int8
select rota.guard(resource => $1, token => $2)
