-- Have every insert into rota.jobs notify us from now on: see rota.wake_dispatchers().
select pg_advisory_lock_shared(1919906913, 1)
