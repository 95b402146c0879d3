-- Quick jobs.
insert into rota.jobs (handler, payload)
select 'email', '{"seconds": 0.05}' from generate_series(1, 40);

-- Slow jobs, in equal shares for three daemons that each have two slots for the queue `slow` and one for `reports`.
insert into rota.jobs (handler, payload) select 'transfer', '{"seconds": 3.2}' from generate_series(1, 6);
insert into rota.jobs (handler, payload) select 'report', '{"seconds": 3.0}' from generate_series(1, 3);
insert into rota.jobs (handler, payload) values ('charge', '{"seconds": 6}');

-- Jobs that fail, snooze, wait, or are inserted twice.
insert into rota.jobs (handler) values ('webhook'), ('import'), ('embargo');
insert into rota.jobs (handler, run_at) values ('newsletter', now() + interval '1 hour');
insert into rota.jobs (handler, unique_key) values ('digest', 'today') on conflict do nothing;
insert into rota.jobs (handler, unique_key) values ('digest', 'today') on conflict do nothing;

select rota.cancel(job_id, note => 'no longer needed') from rota.jobs where handler = 'newsletter';
