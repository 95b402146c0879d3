-- Finished jobs (the ledger), attempts that did not succeed, dead letters, and the housekeeping that deletes them.

-- One row per finished job. It is inserted by the statement that deletes the job from rota.jobs and checks its fence token.
create table rota.job_runs (
    job_id           bigint not null,
    schedule_id      bigint,
    scheduled_for    timestamptz not null,
    fence_token      bigint,
    started_at       timestamptz,
    finished_at      timestamptz not null,
    node             uuid,
    attempts         integer not null,
    outcome          text not null
        constraint "outcome must be succeeded, cancelled, expired or discarded"
            check (outcome in ('succeeded', 'cancelled', 'expired', 'discarded')),
    handler          text not null,
    queue            text not null,
    unique_key       text,
    idempotency_key  text,
    meta             jsonb,
    result           jsonb constraint "result must be at most 8 KiB as text" check (octet_length(result::text) <= 8192),
    note             text
) partition by range (finished_at);
create index job_runs_job_id_idx on rota.job_runs (job_id);
comment on table rota.job_runs is
    'The ledger: one row per finished job, partitioned by the UTC day of finished_at. rota.rotate_ledger() creates and drops partitions.';

-- The default partition takes the rows of a day that has no partition. Without it, no job could finish on such a day.
create table rota.job_runs_default partition of rota.job_runs default;
-- It has no primary key. Without this setting, a publication FOR ALL TABLES forbids the deletes of rota.rotate_ledger().
alter table rota.job_runs_default replica identity full;

-- Append-only, one row per attempt that did not succeed. The last 20 attempts of a job are kept.
create table rota.attempts (
    job_id           bigint not null,
    fence_token      bigint not null,
    attempt          integer not null,
    node             uuid,
    started_at       timestamptz,
    finished_at      timestamptz not null default clock_timestamp(),
    outcome          text not null,
    error_kind       text,
    error            text constraint "error must be at most 8 KiB" check (octet_length(error) <= 8192),
    redriven_at      timestamptz,
    redriven_by      text,
    dead_reason      text,
    primary key (job_id, fence_token)
);
create index prune_attempts_idx on rota.attempts (finished_at);


-- -------------------------------------------------------------------------------------------------------- dead letters

create table rota.dead_letters (
    job_id           bigint primary key,
    run_at           timestamptz not null,
    scheduled_for    timestamptz not null,
    created_at       timestamptz not null,
    fence_token      bigint,
    node             uuid,
    started_at       timestamptz,
    finished_at      timestamptz not null default clock_timestamp(),
    schedule_id      bigint,
    attempt          integer not null,
    losses           integer not null,
    releases         integer not null,
    max_attempts     integer,
    priority         smallint not null,
    exclusive        boolean not null,
    handler          text not null,
    queue            text not null,
    created_by       text not null,
    payload          jsonb not null,
    delivery         text,
    backoff_base     interval,
    backoff_cap      interval,
    retry_for        interval,
    timeout          interval,
    lease            interval,
    unique_key       text,
    idempotency_key  text,
    meta             jsonb,
    checkpoint       jsonb,
    progress         real,
    progress_note    text,
    reason           text not null
        constraint "permanent, exhausted, poison, lost, bad_payload or expired"
            check (reason in ('permanent', 'exhausted', 'poison', 'lost', 'bad_payload', 'expired')),
    error_kind       text,
    error            text
);
create index prune_dead_letters_idx on rota.dead_letters (finished_at);
create index redrive_dead_letters_idx on rota.dead_letters (handler, finished_at);
comment on table rota.dead_letters is
    'Jobs that are not tried again automatically. rota.redrive() makes one live again, rota.discard() moves it to the ledger.';

-- SECURITY DEFINER, so that a login that may insert a dead letter needs no right to call rota.tell().
create function rota.tell_of_dead_letter() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota.tell('rota_dead', new.job_id::text);
    return null;
end $$;

create trigger tell after insert on rota.dead_letters for each row execute function rota.tell_of_dead_letter();

-- A trigger, so that every kind of redrive is recorded. A deleted dead letter was redriven if its job is live.
create function rota.record_redrives() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update rota.attempts as last_attempt
    set redriven_at = clock_timestamp(), redriven_by = rota.caller(), dead_reason = deleted_letters.reason
    from deleted_letters
    join rota.jobs as live_job on live_job.job_id = deleted_letters.job_id
    where last_attempt.job_id = deleted_letters.job_id
      and last_attempt.fence_token = deleted_letters.fence_token;
    return null;
end $$;

create trigger record_redrives after delete on rota.dead_letters
    referencing old table as deleted_letters
    for each statement execute function rota.record_redrives();


-- -------------------------------------------------------------------------------------------------------- housekeeping

create table rota.housekeeping (
    piece         text primary key,
    succeeded_at  timestamptz not null default now(),
    failed_at     timestamptz,
    error         text
);
comment on table rota.housekeeping is 'One row per piece of housekeeping: its last success by any daemon, and the error of its last run if that run failed.';

-- A piece whose table was locked has neither succeeded nor failed. Only the age of succeeded_at shows it.
create function rota.note_housekeeping(piece text, failure text, busy boolean default false) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if note_housekeeping.failure is not null or not note_housekeeping.busy then
        insert into rota.housekeeping as existing (piece, failed_at, error)
        values (note_housekeeping.piece, case when note_housekeeping.failure is not null then now() end,
                left(note_housekeeping.failure, 1000))
        on conflict (piece) do update
        set succeeded_at = case when excluded.error is null then now() else existing.succeeded_at end,
            failed_at = coalesce(excluded.failed_at, existing.failed_at),
            error = excluded.error
        -- Every daemon does each piece each minute: one write for all daemons is enough.
        where excluded.error is distinct from existing.error or existing.succeeded_at < now() - interval '30 seconds';
    end if;
end $$;

-- Each partition succeeds or fails alone: a view on an old partition keeps only that partition from being dropped.
-- DateStyle is set because the body converts days to text and back, standard_conforming_strings because of the backslash in its pattern.
create function rota.rotate_ledger(keep interval default interval '7 days', ahead integer default 3)
    returns table (made integer, dropped integer)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set standard_conforming_strings = on set datestyle = 'ISO, YMD'
    -- A waiting exclusive lock blocks every settlement behind it, so the wait is short. Daemons try again a minute later.
    set lock_timeout = '200ms' as $$
declare
    today date := (now() at time zone 'UTC')::date;
    day date;
    name text;
    is_locked boolean;
    failure text;
    dependent_objects text;
begin
    made := 0;
    dropped := 0;
    perform from rota.locks as lock where lock.name = 'ledger' for update skip locked;
    if not found then
        return next;
        return;
    end if;

    is_locked := false;
    for day in select today + n from generate_series(0, ahead) as n loop
        name := 'job_runs_' || to_char(day, 'YYYYMMDD');
        if to_regclass('rota.' || name) is null then
            begin
                execute format('create table rota.%I (like rota.job_runs including defaults including constraints)', name);
                -- Jobs that ended on a day without a partition are in the default partition. Those rows would keep the day's
                -- partition from being attached, so move them.
                execute format('with moved_rows as (delete from rota.job_runs_default where finished_at >= %L and finished_at < %L '
                               'and (select count(*) from (select from rota.job_runs_default limit 10001) as few) <= 10000 '
                               'returning *) insert into rota.%I select * from moved_rows',
                               day || ' 00:00:00+00', day + 1 || ' 00:00:00+00', name);
                execute format('alter table rota.job_runs attach partition rota.%I for values from (%L) to (%L)',
                               name, day || ' 00:00:00+00', day + 1 || ' 00:00:00+00');
                made := made + 1;
            exception
                when lock_not_available then
                    is_locked := true;  -- a long transaction has the table locked
                    exit;
                when check_violation then
                    null;  -- over 10,000 rows in the default partition: they stay there until they expire
                when others then
                    failure := coalesce(failure, format('%s: %s', name, sqlerrm));
            end;
        end if;
    end loop;
    perform rota.note_housekeeping('ledger_create', failure, is_locked);

    is_locked := false;
    failure := null;
    if keep > interval '0' then
        for name in
            select relname from pg_class
            join pg_inherits on inhrelid = pg_class.oid
            where inhparent = 'rota.job_runs'::regclass and relname ~ '^job_runs_\d{8}$'
            order by relname
        loop
            begin
                if to_date(right(name, 8), 'YYYYMMDD') + 1 <= (now() - keep) at time zone 'UTC' then
                    execute format('drop table rota.%I', name);
                    dropped := dropped + 1;
                end if;
            exception
                when lock_not_available then
                    is_locked := true;
                    exit;
                when others then
                    get stacked diagnostics dependent_objects = pg_exception_detail;
                    failure := coalesce(failure, format('%s: %s', name, sqlerrm)
                        || case when sqlstate = '2BP01' then coalesce(' (' || dependent_objects || ')', '') else '' end);
            end;
        end loop;
        begin
            delete from rota.job_runs_default
            where ctid = any (array(select ctid from rota.job_runs_default where finished_at < now() - keep limit 10000));
        exception
            when lock_not_available then
                is_locked := true;
            when others then
                failure := coalesce(failure, 'job_runs_default: ' || sqlerrm);
        end;
    end if;
    perform rota.note_housekeeping('ledger_drop', failure, is_locked);
    return next;
end $$;

create function rota.prune_audit(keep interval default interval '400 days', "limit" integer default 1000) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    pruned_count bigint;
begin
    -- Daemons can delete from the audit only with this function, and it never deletes the last day.
    delete from rota.audit
    where audit_id = any (array(
        select expired.audit_id from rota.audit as expired
        where expired.done_at < now() - greatest(prune_audit.keep, interval '1 day')
        order by expired.done_at
        limit prune_audit."limit"
        for update skip locked));
    get diagnostics pruned_count = row_count;
    return pruned_count;
end $$;
comment on function rota.prune_audit is 'Delete audit rows older than keep (at least a day), at most limit. Returns how many were deleted.';
