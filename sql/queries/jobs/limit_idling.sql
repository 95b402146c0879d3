-- Let the server end the open transaction if it idles for longer than $1. Without this, a stopped or disconnected client would
-- keep its locks after its lease has ended.
--   $1 lease  text   with a unit, such as 30000ms
--   -> set_config text?
select pg_catalog.set_config('idle_in_transaction_session_timeout', $1, true)
