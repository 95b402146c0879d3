-- End the transaction that is open here if it idles for longer than $1: who was stopped or cut off must not keep its locks beyond
-- the lease.
--   $1 lease  text   such as 30000ms
--   -> set_config text?
select pg_catalog.set_config('idle_in_transaction_session_timeout', $1, true)
