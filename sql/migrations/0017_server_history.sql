-- After a fail-over to a standby that lagged behind, or a restore, sequences are behind, and ids would be issued twice. The database
-- notes on which server it is, and raises its sequences when that changes: at the first insert of a session, and when a daemon connects.

insert into rota.locks (name) values ('server');

-- The server on which the ids were last known to be new. Sequences, not columns: a note must be visible to other sessions before the
-- transaction that makes it ends, which is a client's transaction and may stay open for long. Not yet called: nothing is noted.
create sequence rota.noted_system_identifier minvalue -9223372036854775808;
create sequence rota.noted_database_oid;
create sequence rota.noted_timeline;
comment on sequence rota.noted_timeline is 'The newest timeline on which this database was used. A promotion begins a new one.';

create function rota.current_server(out system_identifier bigint, out database_oid bigint, out timeline bigint)
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    -- Services that only resemble PostgreSQL may refuse some of this. What can't be read counts as never changing.
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
revoke all on function rota.current_server() from public;
comment on function rota.current_server() is 'Which server and database this is, and on which timeline. On a standby, the timeline of its last checkpoint.';

create function rota.note_server() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    here record;
    noted record;
    is_locked boolean := false;
    sequence regclass;
begin
    if pg_is_in_recovery() or current_setting('transaction_read_only')::boolean then
        return false;
    end if;
    select * into here from rota.current_server();
    for tries in 1..20 loop
        select system.last_value as system_identifier, database.last_value as database_oid, timeline.last_value as timeline,
            system.is_called and database.is_called and timeline.is_called as is_noted, jobs.is_called as is_used
        into noted
        from rota.noted_system_identifier as system, rota.noted_database_oid as database, rota.noted_timeline as timeline,
            rota.jobs_job_id_seq as jobs;
        if noted.is_noted and (noted.system_identifier, noted.database_oid, noted.timeline)
                = (here.system_identifier, here.database_oid, here.timeline) then
            return false;
        end if;
        exit when is_locked;
        perform from rota.locks where name = 'server' for update skip locked;
        is_locked := found;
        -- The holder raises the sequences at once, but its transaction may stay open for long: do not wait for its end.
        if not is_locked then
            perform pg_sleep(0.005);
        end if;
    end loop;
    if not is_locked then
        return false;
    end if;
    -- A database made from a template in which no job was ever inserted has lost nothing.
    noted.is_noted := noted.is_noted and (noted.is_used
        or (noted.system_identifier, noted.timeline) <> (here.system_identifier, here.timeline));
    if noted.is_noted then
        -- 2^24: more than any standby can lag behind, and small enough for 2^39 fail-overs.
        foreach sequence in array array['rota.jobs_job_id_seq', 'rota.schedule_definitions_schedule_id_seq',
                'rota.audit_audit_id_seq', 'rota.fence_tokens']::regclass[] loop
            perform setval(sequence, greatest(coalesce(pg_sequence_last_value(sequence), 0), 0) + 16777216);
        end loop;
    end if;
    perform setval('rota.noted_system_identifier', here.system_identifier);
    perform setval('rota.noted_database_oid', here.database_oid);
    perform setval('rota.noted_timeline', here.timeline);
    return noted.is_noted;
end $$;
revoke all on function rota.note_server() from public;
comment on function rota.note_server() is
    'Raise the sequences of ids and fence tokens if this database is on another server or timeline than noted. True if it raised them.';

create function rota.note_server_of_session() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota.note_server();
    perform set_config('rota.server_noted', 'on', false);
    return null;
end $$;
revoke all on function rota.note_server_of_session() from public;

-- Before the first insert of a session: it never moves to another server. A client may insert before any daemon has connected.
create trigger note_server before insert on rota.jobs for each statement
    when (current_setting('rota.server_noted', true) is distinct from 'on')
    execute function rota.note_server_of_session();
create trigger note_server before insert on rota.schedule_definitions for each statement
    when (current_setting('rota.server_noted', true) is distinct from 'on')
    execute function rota.note_server_of_session();

create or replace function rota.raise_fence_tokens() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    micros bigint;
    is_raised boolean := rota.note_server();
begin
    for tries in 1..10 loop
        exit when pg_try_advisory_xact_lock(1919906913, 4);
        perform pg_sleep(0.01);
    end loop;
    perform from rota.locks where name = 'fence_tokens' for update;
    micros := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    if micros <= (select last_value from rota.fence_tokens) then
        return is_raised;
    end if;
    -- Claims take no lock. Without the tenth of a second, those between the reading of the sequence and setval() could be given
    -- tokens that are then issued again.
    perform setval('rota.fence_tokens', micros + 100000);
    return true;
end $$;

select rota.note_server();
