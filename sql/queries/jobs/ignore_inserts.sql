-- Spare inserts the notification, as far as we are concerned: see rota.wake_dispatchers().
--   -> released bool?
select pg_advisory_unlock_shared(1919906913, 1) as released
