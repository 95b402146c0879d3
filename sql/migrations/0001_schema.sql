-- Schema, version, locks, helper functions, server identity, handlers, queues, daemons and audit.

create schema rota;
revoke all on schema rota from public;

create table rota.migrations (
    version     integer primary key,
    name        text not null,
    checksum    text not null,
    applied_at  timestamptz not null default now()
);

-- One row: the identity of this installation, and the daemons that may work on it.
create table rota.meta (
    only_row           boolean primary key default true constraint "there is one installation" check (only_row),
    installation_id    uuid    not null default gen_random_uuid(),
    schema_version     integer not null,
    oldest_compatible  integer not null,
    planned_with       text
);
comment on column rota.meta.planned_with is
    'The rota and time zone data with which all next fires were computed. Daemons with other versions compute them again.';

-- Each row is a lock. Only the owner may lock the rows, because roles.sql grants no UPDATE on them.
create table rota.locks (
    name  text primary key
);
insert into rota.locks (name) values ('fence_tokens'), ('ledger'), ('server');
comment on table rota.locks is 'Rows that rota''s functions lock. Any login could hold an advisory lock instead.';


-- ------------------------------------------------------------------------------------------------------------- helpers

-- plpgsql, because the planner would inline an SQL function once for each CHECK of an INSERT, which takes longer than the insert.
-- The function runs for every row, and a SET clause would cost too much. So it names the schema of every operator instead.
-- Parts of different signs are refused: '106751000 days -2562023976 hours' equals 24 hours, but PostgreSQL adds the days to an
-- instant first, which overflows.
create function rota.is_duration(value interval) returns boolean
    language plpgsql immutable strict parallel safe as $$
begin
    return value operator(pg_catalog.>) interval '0'
       and value operator(pg_catalog.<=) interval '366 days'
       and extract(year from value) operator(pg_catalog.=) 0
       and extract(month from value) operator(pg_catalog.=) 0
       and extract(day from value) operator(pg_catalog.>=) 0
       and extract(hour from value) operator(pg_catalog.>=) 0
       and extract(minute from value) operator(pg_catalog.>=) 0
       and extract(second from value) operator(pg_catalog.>=) 0;
end $$;

-- For statements that compute with stored intervals. Rows that were restored, or written while the constraints were dropped, may
-- hold any interval.
create function rota.bounded_duration(value interval) returns interval
    language sql immutable parallel safe
    return case when value is not null then pg_catalog.make_interval(
        secs => least(greatest(extract(epoch from value), 0.000001), 31622400)::double precision
    ) end;
comment on function rota.bounded_duration is
    'The same length of time without days and months, between 1 microsecond and 366 days. Added to an instant of this century, it never overflows.';

-- A name that fits on one line of a log: 1 to 200 characters, without line breaks and other control characters.
create function rota.is_name(value text) returns boolean
    language sql immutable parallel safe
    return length(value) between 1 and 200
       and value !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]';

-- Also correct inside a SECURITY DEFINER function, where current_user is the owner of the function.
create function rota.caller() returns text
    language sql stable parallel safe
    return coalesce(nullif(current_setting('role', true), 'none'), session_user::text);

-- The server has one queue of notifications. A session that listens and leaves a transaction open keeps the queue from being emptied.
-- Once the queue is full, each transaction that notifies fails at its end. Reading its usage also advances the start of the queue.
-- A transaction that has notified cannot be prepared (PREPARE TRANSACTION): the setting rota.notify is for such transactions.
create function rota.tell(channel text, message text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('rota.notify', true) is distinct from 'off' and pg_notification_queue_usage() < 0.9 then
        perform pg_notify(channel, message);
    end if;
end $$;
comment on function rota.tell is
    'NOTIFY, unless the server''s notification queue is nearly full or rota.notify is off. `set local rota.notify = off` is for transactions that are to be prepared; polling finds their rows.';


-- ------------------------------------------------------------------------------------------------------------- server
-- After a fail-over to a standby that lagged behind, or after a restore, sequences are behind and would issue ids twice. So the
-- database records on which server it runs, and raises its sequences if the server has changed. It checks this at the first insert of
-- each session, and when a daemon connects.

-- Fence tokens order the claims of the whole installation, not of one job.
create sequence rota.fence_tokens as bigint;

-- The server on which this database last ran. It is recorded in sequences, because other sessions must see it at once: the
-- transaction that writes it is a client's and may stay open for long. Until the first record, is_called is false.
create sequence rota.noted_system_identifier minvalue -9223372036854775808;
create sequence rota.noted_database_oid;
create sequence rota.noted_timeline;
comment on sequence rota.noted_timeline is 'The newest timeline on which this database was used. A promotion begins a new one.';

create function rota.current_server(out system_identifier bigint, out database_oid bigint, out timeline bigint)
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    -- Services that only resemble PostgreSQL may refuse these calls. A value that cannot be read is replaced by a constant.
    database_oid := (select database.oid::bigint from pg_database as database where database.datname = current_database());
    begin
        system_identifier := (select control.system_identifier from pg_control_system() as control);
    exception when others then
        system_identifier := 0;
    end;
    begin
        timeline := case when pg_is_in_recovery() then (select control.timeline_id from pg_control_checkpoint() as control)
            else ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint end;
    exception when others then
        timeline := 1;
    end;
end $$;
comment on function rota.current_server() is 'The server, database and timeline of this session. On a standby, the timeline of its last checkpoint.';

create function rota.note_server() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    this_server record;
    noted record;
    is_locked boolean := false;
    sequence regclass;
begin
    if pg_is_in_recovery() or current_setting('transaction_read_only')::boolean then
        return false;
    end if;
    select * into this_server from rota.current_server();
    for tries in 1..20 loop
        select system.last_value as system_identifier, database.last_value as database_oid, timeline.last_value as timeline,
            system.is_called and database.is_called and timeline.is_called as is_noted, jobs.is_called as is_used
        into noted
        from rota.noted_system_identifier as system, rota.noted_database_oid as database, rota.noted_timeline as timeline,
            rota.jobs_job_id_seq as jobs;
        if noted.is_noted and (noted.system_identifier, noted.database_oid, noted.timeline)
                = (this_server.system_identifier, this_server.database_oid, this_server.timeline) then
            return false;
        end if;
        exit when is_locked;
        perform from rota.locks where name = 'server' for update skip locked;
        is_locked := found;
        -- The holder of the lock raises the sequences at once, but its transaction may stay open for long: do not wait for its end.
        if not is_locked then
            perform pg_sleep(0.005);
        end if;
    end loop;
    if not is_locked then
        return false;
    end if;
    -- A database that was created from a template without any job has lost nothing.
    noted.is_noted := noted.is_noted and (noted.is_used
        or (noted.system_identifier, noted.timeline) <> (this_server.system_identifier, this_server.timeline));
    if noted.is_noted then
        -- 2^24 ids are more than any standby can lag behind, and allow 2^39 fail-overs.
        foreach sequence in array array['rota.jobs_job_id_seq', 'rota.schedule_definitions_schedule_id_seq',
                'rota.audit_audit_id_seq', 'rota.fence_tokens']::regclass[] loop
            perform setval(sequence, greatest(coalesce(pg_sequence_last_value(sequence), 0), 0) + 16777216);
        end loop;
    end if;
    perform setval('rota.noted_system_identifier', this_server.system_identifier);
    perform setval('rota.noted_database_oid', this_server.database_oid);
    perform setval('rota.noted_timeline', this_server.timeline);
    return noted.is_noted;
end $$;
comment on function rota.note_server() is
    'Raise the sequences of ids and fence tokens if this database is on another server or timeline than noted. Returns true if it raised them.';

-- Runs at the first insert of a session: a session never moves to another server, and a client may insert before any daemon connects.
create function rota.note_server_of_session() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota.note_server();
    perform set_config('rota.server_noted', 'on', false);
    return null;
end $$;

create function rota.raise_fence_tokens() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    micros bigint;
    is_raised boolean := rota.note_server();
begin
    perform from rota.locks where name = 'fence_tokens' for update;
    micros := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    if micros <= (select last_value from rota.fence_tokens) then
        return is_raised;
    end if;
    -- Claims take no lock: a claim between the read of the sequence and setval() could get a token that is then issued again. The
    -- added tenth of a second prevents that.
    perform setval('rota.fence_tokens', micros + 100000);
    return true;
end $$;
comment on function rota.raise_fence_tokens() is
    'Raise the sequence of fence tokens to the clock in microseconds if it is behind. A fail-over can set it back, and a token must never be issued twice.';


-- ------------------------------------------------------------------------------------------ handlers, queues, daemons, audit

create table rota.handlers (
    handler       text primary key constraint "handler must be a name of 1 to 200 characters on one line" check (rota.is_name(handler)),
    app           text,
    release       text,
    queue         text constraint "queue must be a name of 1 to 200 characters on one line" check (rota.is_name(queue)),
    max_attempts  integer constraint "max_attempts must lie between 1 and 1000" check (max_attempts between 1 and 1000),
    backoff_base  interval constraint "backoff_base must be positive, at most 366 days, without months" check (rota.is_duration(backoff_base)),
    backoff_cap   interval constraint "backoff_cap must be positive, at most 366 days, without months" check (rota.is_duration(backoff_cap)),
    timeout       interval constraint "timeout must be positive, at most 366 days, without months" check (rota.is_duration(timeout)),
    delivery      text constraint "delivery must be at_least_once or at_most_once" check (delivery in ('at_least_once', 'at_most_once')),
    seen_at       timestamptz,
    paused        boolean not null default false,
    pause_reason  text,
    paused_by     text,
    paused_at     timestamptz
);
comment on table rota.handlers is 'One row per handler name. Daemons write it when they start; operators change only paused, with rota.pause_handler().';

create table rota.queues (
    queue         text primary key constraint "queue must be a name of 1 to 200 characters on one line" check (rota.is_name(queue)),
    paused        boolean not null default false,
    pause_reason  text,
    paused_by     text,
    paused_at     timestamptz
);
comment on table rota.queues is 'Which queues are paused. The name * means all queues.';

create table rota.nodes (
    node_id       uuid primary key,
    host          text not null,
    pid           integer not null,
    rota_version  text not null,
    release       text,
    app           text,
    handlers      text[] not null,
    queues        text[] not null,
    slots         jsonb not null,
    shards        integer[] not null default '{}',
    tzdata        text,
    state         text not null default 'running' constraint "state must be running or draining" check (state in ('running', 'draining')),
    started_at    timestamptz not null default now(),
    seen_at       timestamptz not null default now(),
    refused       jsonb
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table rota.nodes is 'One row per daemon process, alive if seen within 15 s. Leases decide about jobs, never these rows.';
comment on column rota.nodes.refused is
    'Rows with which the database refused an operation of this daemon within the last minute: an array of at most 20 objects.';

-- Not in rota.nodes: its readers count each row as a daemon.
create table rota.lost_nodes (
    node_id       uuid primary key,
    host          text not null,
    pid           integer not null,
    rota_version  text not null,
    release       text,
    app           text,
    handlers      text[] not null,
    queues        text[] not null,
    slots         jsonb not null,
    tzdata        text,
    state         text not null,
    started_at    timestamptz not null,
    seen_at       timestamptz not null
);
create index prune_lost_nodes_idx on rota.lost_nodes (seen_at);
comment on table rota.lost_nodes is
    'Daemons that vanished without a shutdown. A row goes after a day, or when the daemon returns, is replaced, or is forgotten with rota.forget_node().';

create table rota.guards (
    resource      text primary key constraint "resource must be a name of 1 to 200 characters on one line" check (rota.is_name(resource)),
    token         bigint not null,
    seen_at       timestamptz not null default now()
);
create index prune_guards_idx on rota.guards (seen_at);
comment on table rota.guards is 'The highest fence token that rota.guard() has seen for each resource.';

create table rota.audit (
    audit_id      bigint generated always as identity primary key,
    done_at       timestamptz not null default clock_timestamp(),
    done_by       text not null default rota.caller(),
    action        text not null,
    target        text not null,
    reason        text,
    affected      bigint not null default 1
);
create index prune_audit_idx on rota.audit (done_at);
comment on table rota.audit is 'Every action of an operator: who did it, on what, when and why.';
