-- Have every insert into rota.jobs notify us from now on: see rota.wake_dispatchers().
--   -> held bool?  false while another session holds the lock exclusively: inserts notify because of that session
-- Never waits: every login may hold this lock, for as long as it likes.
select pg_try_advisory_lock_shared(1919906913, 1) as held
