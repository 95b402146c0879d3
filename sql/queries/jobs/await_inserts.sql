-- Take the shared advisory lock that makes inserts into rota.jobs send a notification: see rota.wake_dispatchers().
--   -> locked bool?  false: another session holds the lock exclusively, and inserts notify because of that session
-- Does not wait for the lock, because any login may hold it for any length of time.
select pg_try_advisory_lock_shared(1919906913, 1) as locked
