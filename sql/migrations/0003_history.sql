-- What became of jobs: the ledger, the attempts that did not succeed, and the dead letters.

-- One row per finished job, written by the statement whose fenced DELETE took the job from rota.jobs.
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
comment on table rota.job_runs is 'The ledger: one row per finished job. Partitioned by the UTC day of its end; rota.rotate_ledger() makes and drops partitions.';

-- The net under the partitions: without it, a day for which none was made would keep every job from finishing.
create table rota.job_runs_default partition of rota.job_runs default;
-- It has no key. Without this, a publication FOR ALL TABLES forbids the deletes below, and no daemon would stay up.
alter table rota.job_runs_default replica identity full;

create function rota.rotate_ledger(keep interval default interval '7 days', ahead integer default 3)
    returns table (made integer, dropped integer)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    -- Who waits for an exclusive lock here blocks every settlement behind it: better to come again at the next turn.
    set lock_timeout = '200ms' as $$
declare
    today date := (now() at time zone 'UTC')::date;
    day date;
    name text;
begin
    made := 0;
    dropped := 0;
    if not pg_try_advisory_xact_lock(1919906913, 2) then
        return next;
        return;
    end if;
    for day in select today + n from generate_series(0, ahead) as n loop
        name := 'job_runs_' || to_char(day, 'YYYYMMDD');
        if to_regclass('rota.' || name) is null then
            begin
                execute format('create table rota.%I (like rota.job_runs including defaults including constraints)', name);
                -- Jobs that ended while no daemon was up to rotate lie in the default partition: they keep a partition of
                -- their day from being attached, and the whole day would end up there.
                execute format('with moved as (delete from rota.job_runs_default where finished_at >= %L and finished_at < %L '
                               'and (select count(*) from (select from rota.job_runs_default limit 10001) as few) <= 10000 '
                               'returning *) insert into rota.%I select * from moved',
                               day || ' 00:00:00+00', day + 1 || ' 00:00:00+00', name);
                execute format('alter table rota.job_runs attach partition rota.%I for values from (%L) to (%L)',
                               name, day || ' 00:00:00+00', day + 1 || ' 00:00:00+00');
                made := made + 1;
            exception when lock_not_available or check_violation then
                null;  -- a long reader, or too many rows of that day in the default partition: those stay, and age, there
            end;
        end if;
    end loop;
    if keep > interval '0' then
        for name in
            select relname from pg_class
            join pg_inherits on inhrelid = pg_class.oid
            where inhparent = 'rota.job_runs'::regclass and relname ~ '^job_runs_\d{8}$'
              and to_date(right(relname, 8), 'YYYYMMDD') + 1 <= (now() - keep) at time zone 'UTC'
            order by relname
        loop
            begin
                execute format('drop table rota.%I', name);
                dropped := dropped + 1;
            exception when lock_not_available then
                null;
            end;
        end loop;
        delete from rota.job_runs_default
        where ctid = any (array(select ctid from rota.job_runs_default where finished_at < now() - keep limit 10000));
    end if;
    return next;
end $$;

-- Append-only, one row per attempt that did not succeed; the last 20 of a job are kept.
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
    primary key (job_id, fence_token)
);
create index prune_attempts_idx on rota.attempts (finished_at);

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
comment on table rota.dead_letters is 'Jobs that will not be tried again by themselves. rota.redrive() sends one back, rota.discard() ends it.';

create function rota.tell_of_dead_letter() returns trigger language plpgsql as $$
begin
    perform pg_notify('rota_dead', new.job_id::text);
    return null;
end $$;

create trigger tell after insert on rota.dead_letters for each row execute function rota.tell_of_dead_letter();
