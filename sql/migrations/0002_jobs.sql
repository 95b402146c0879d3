-- Live jobs (scheduled or running) and the requests to cancel them. A finished job moves to the ledger, so rota.jobs stays small.

-- Every CHECK also runs at each update. Expensive CHECKs begin with "state = 'running' or", so that claims and heartbeats do not check
-- again what was valid at the insert.
create table rota.jobs (
    job_id            bigint generated always as identity primary key,
    run_at            timestamptz not null
        constraint "run_at must lie between the years 1970 and 2200" check (run_at >= timestamptz '1970-01-01 00:00:00+00' and run_at < timestamptz '2200-01-01 00:00:00+00'),
    scheduled_for     timestamptz not null
        constraint "scheduled_for must lie between the years 1970 and 2200" check (scheduled_for >= timestamptz '1970-01-01 00:00:00+00' and scheduled_for < timestamptz '2200-01-01 00:00:00+00'),
    created_at        timestamptz not null default now(),
    fence_token       bigint,
    leased_by         uuid,
    lease_expires_at  timestamptz,
    started_at        timestamptz,
    schedule_id       bigint,
    start_by          timestamptz
        constraint "start_by must lie between the years 1970 and 2200" check (start_by >= timestamptz '1970-01-01 00:00:00+00' and start_by < timestamptz '2200-01-01 00:00:00+00'),
    attempt           integer not null default 0,
    losses            integer not null default 0
        -- The claim searches for losses / 2 = 0 and 1. The third loss in a row ends the job.
        constraint "losses must lie between 0 and 3" check (losses between 0 and 3),
    releases          integer not null default 0,
    max_attempts      integer
        constraint "max_attempts must lie between 1 and 1000" check (max_attempts between 1 and 1000),
    priority          smallint not null
        constraint "priority must lie between 0 (first) and 9 (last)" check (priority between 0 and 9),
    exclusive         boolean not null default false,
    state             text not null default 'scheduled'
        constraint "state must be scheduled or running" check (state in ('scheduled', 'running')),
    handler           text not null
        constraint "handler must be a name of 1 to 200 characters on one line" check (state = 'running' or length(handler) between 1 and 200 and handler !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]'),
    queue             text not null
        constraint "queue must be a name of 1 to 200 characters on one line" check (state = 'running' or length(queue) between 1 and 200 and queue !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]'),
    created_by        text not null,
    payload           jsonb not null
        -- A document of 100 levels has at least 200 bytes: shorter payloads, nearly all of them, skip the path query.
        constraint "payload must be at most 1 MiB as text, and at most 100 deep"
            check (state = 'running' or case
                when octet_length(payload::text) < 200 then true
                when octet_length(payload::text) > 1048576 then false
                else not jsonb_path_exists(payload, 'strict $.**{101}') end),
    delivery          text
        constraint "delivery must be at_least_once or at_most_once" check (delivery in ('at_least_once', 'at_most_once')),
    backoff_base      interval
        constraint "backoff_base must be positive, at most 366 days, without months" check (state = 'running' or rota.is_duration(backoff_base)),
    backoff_cap       interval
        constraint "backoff_cap must be positive, at most 366 days, without months" check (state = 'running' or rota.is_duration(backoff_cap)),
    retry_for         interval
        constraint "retry_for must be positive, at most 366 days, without months" check (state = 'running' or rota.is_duration(retry_for)),
    timeout           interval
        constraint "timeout must be positive, at most 366 days, without months" check (state = 'running' or rota.is_duration(timeout)),
    lease             interval
        constraint "lease must lie between 3 seconds and 1 day" check (state = 'running' or lease between interval '3 seconds' and interval '1 day' and rota.is_duration(lease)),
    unique_key        text
        constraint "unique_key must have 1 to 500 characters" check (length(unique_key) between 1 and 500),
    idempotency_key   text
        constraint "idempotency_key must have 1 to 500 characters" check (length(idempotency_key) between 1 and 500)
        constraint "idempotency_key must not begin with rota:" check (not starts_with(idempotency_key, 'rota:')),
    meta              jsonb
        constraint "meta must be an object of at most 64 KiB" check (state = 'running' or jsonb_typeof(meta) = 'object' and octet_length(meta::text) <= 65536),
    checkpoint        jsonb
        constraint "checkpoint must be at most 64 KiB as text" check (octet_length(checkpoint::text) <= 65536),
    progress          real
        constraint "progress must lie between 0 and 1" check (progress between 0 and 1),
    progress_note     text
        constraint "progress_note must have at most 500 characters" check (length(progress_note) <= 500),
    -- The columns of the job that is inserted when this running job ends: put_job() with on_conflict => 'queue_one'.
    follow_up         jsonb,
    constraint "running means an owner, a lease and a token; waiting, no owner"
        check (case state when 'running'
               then leased_by is not null and lease_expires_at is not null and fence_token is not null
               else leased_by is null and lease_expires_at is null end),
    -- An entry of jobs_unique_key_idx has at most 2704 bytes. Rows that were claimed before are not checked: their key was compressed
    -- into the index, and they must still be retried.
    constraint "handler and unique_key must have at most 2680 bytes together"
        check (fence_token is not null or octet_length(handler) + octet_length(unique_key) <= 2680)
) with (
    fillfactor = 80,
    -- Vacuum early and without pauses, but never truncate: truncating needs an exclusive lock.
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.1, autovacuum_analyze_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off
);
comment on table rota.jobs is 'Live jobs only (scheduled or running). Insert with any subset of the public columns; NULL means the default.';

-- Claims read this index. The third column is 1 for suspects (lost twice in a row) and 0 for other jobs, so that a scan finds one
-- group without reading the other. It is a number because the planner rewrites comparisons with a boolean, and then the index no
-- longer gives the order.
create index claim_due_jobs_idx on rota.jobs (queue, handler, (losses / 2), priority, run_at) where state = 'scheduled';
-- lease_expires_at is in no index, so that a heartbeat is a HOT update.
create index find_expired_leases_idx on rota.jobs (job_id) where state = 'running';
create index expire_unstarted_jobs_idx on rota.jobs (start_by) where start_by is not null and state = 'scheduled' and fence_token is null;
create unique index jobs_unique_key_idx on rota.jobs (handler, unique_key) where unique_key is not null;
create unique index jobs_exclusive_idx on rota.jobs (schedule_id) where exclusive;

-- ORMs send explicit NULLs, so a column's DEFAULT is not enough. The function runs for every row, and a SET clause would
-- cost too much. So it names the schema of every function and operator instead.
create function rota.fill_in_job() returns trigger language plpgsql as $$
begin
    if new.queue is null then
        new.queue := coalesce(
            (select handlers.queue from rota.handlers where handlers.handler operator(pg_catalog.=) new.handler), 'default'
        );
    end if;
    new.run_at := coalesce(new.run_at, pg_catalog.now());
    new.scheduled_for := coalesce(new.scheduled_for, new.run_at);
    new.priority := coalesce(new.priority, 5);
    new.payload := coalesce(new.payload, '{}');
    if new.created_by is null then  -- a redriven job keeps its own; clients have no privilege on this column
        new.created_by := pg_catalog.current_setting('role', true);
        if new.created_by is null or new.created_by operator(pg_catalog.=) 'none' then
            new.created_by := session_user;
        end if;
    end if;
    return new;
end $$;

-- Daemons insert a schedule's job with all columns set. The condition saves them the call.
create trigger fill_in before insert on rota.jobs for each row
    when (num_nulls(new.queue, new.run_at, new.scheduled_for, new.priority, new.payload, new.created_by) > 0)
    execute function rota.fill_in_job();

-- NOTIFY at every commit would serialise the commits of all clients. So a dispatcher that waits holds a shared advisory lock on its
-- listening connection, and an insert notifies only when it cannot take that lock for itself. The lock lives in shared memory: no
-- rows, no WAL, and it ends with the session of a dispatcher that dies.
-- The lock is taken and released within one expression. A cancel between two statements would leave the lock to the session: no
-- dispatcher could take its own, and every insert would notify.
create function rota.wake_dispatchers() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not (pg_try_advisory_lock(1919906913, 1) and pg_advisory_unlock(1919906913, 1)) then
        perform rota.tell('rota_wake', '');
    end if;
    return null;
end $$;

create trigger wake after insert on rota.jobs for each statement execute function rota.wake_dispatchers();
create trigger wake_again after update of run_at on rota.jobs for each statement execute function rota.wake_dispatchers();

-- A trigger and not a CHECK, which would also run at updates: stored jobs with a longer key must still be claimed and retried.
create function rota.refuse_long_key() returns trigger
    language plpgsql as $$
begin
    raise exception using errcode = 'check_violation',
        message = pg_catalog.format('handler and unique_key must have at most 2600 bytes together, not %s',
            pg_catalog.octet_length(new.handler) operator(pg_catalog.+) pg_catalog.octet_length(new.unique_key)),
        hint = 'Use a digest of the key, such as encode(sha256(…), ''hex'').';
end $$;

create trigger refuse_long_key before insert on rota.jobs for each row
    when (octet_length(new.handler) + octet_length(new.unique_key) > 2600)
    execute function rota.refuse_long_key();

create trigger note_server before insert on rota.jobs for each statement
    when (current_setting('rota.server_noted', true) is distinct from 'on')
    execute function rota.note_server_of_session();

-- Record the server on which this database was created.
select rota.note_server();

-- Every end of a job deletes its row. replace_job() has checked the values by an insert that it rolled back.
create function rota.insert_follow_up() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into rota.jobs (handler, unique_key, created_by, payload, queue, run_at, priority, max_attempts, backoff_base,
        backoff_cap, retry_for, timeout, lease, delivery, start_by, idempotency_key, meta)
    select old.handler, old.unique_key, job.created_by, job.payload, job.queue, job.run_at, job.priority, job.max_attempts,
        job.backoff_base, job.backoff_cap, job.retry_for, job.timeout, job.lease, job.delivery, job.start_by,
        job.idempotency_key, job.meta
    from jsonb_to_record(old.follow_up) as job (
        created_by text, payload jsonb, queue text, run_at timestamptz, priority smallint, max_attempts integer,
        backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery text,
        start_by timestamptz, idempotency_key text, meta jsonb
    );
    return null;
end $$;

create trigger insert_follow_up after delete on rota.jobs for each row
    when (old.follow_up is not null)
    execute function rota.insert_follow_up();

-- A request to cancel a running job is a row here, so that the request never locks the job's row.
create table rota.cancel_requests (
    job_id            bigint primary key,
    requested_at      timestamptz not null default clock_timestamp(),
    requested_by      text not null,
    reason            text
);
