-- Release the lock of await_inserts: this session needs no notifications of inserts. See rota.wake_dispatchers().
--   -> released bool?
select pg_advisory_unlock_shared(1919906913, 1) as released
