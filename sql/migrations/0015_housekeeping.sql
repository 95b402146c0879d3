-- Housekeeping fails piece by piece and is on record; daemons that vanished stay listed for a day; the audit is pruned.

create table rota.housekeeping (
    piece         text primary key,
    succeeded_at  timestamptz not null default now(),
    failed_at     timestamptz,
    error         text
);
comment on table rota.housekeeping is 'One row per piece of housekeeping: its last success by any daemon, and the error of its last run if that failed.';

create index prune_audit_idx on rota.audit (done_at);

-- Not in rota.nodes: what reads that table counts its rows as daemons, and must not read a day of autoscaled ones.
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
comment on table rota.lost_nodes is 'Daemons that vanished without saying goodbye, for a day, or until they return, are replaced, or are forgotten by rota.forget_node().';

-- Each partition succeeds or fails alone: a view on an old one keeps that one from being dropped, and nothing else.
create or replace function rota.rotate_ledger(keep interval default interval '7 days', ahead integer default 3)
    returns table (made integer, dropped integer)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set standard_conforming_strings = on set datestyle = 'ISO, YMD'
    -- A waiting exclusive lock blocks every settlement behind it: better to try again at the next turn.
    set lock_timeout = '200ms' as $$
declare
    today date := (now() at time zone 'UTC')::date;
    day date;
    name text;
    busy boolean;
    failure text;
    objects text;
begin
    made := 0;
    dropped := 0;
    perform from rota.locks as lock where lock.name = 'ledger' for update skip locked;
    if not found then
        return next;
        return;
    end if;

    busy := false;
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
            exception
                when lock_not_available then
                    busy := true;  -- a long reader holds the table
                    exit;
                when check_violation then
                    null;  -- too many rows of that day in the default partition: they stay, and age, there
                when others then
                    failure := coalesce(failure, format('%s: %s', name, sqlerrm));
            end;
        end if;
    end loop;
    perform rota.note_housekeeping('ledger_create', failure, busy);

    busy := false;
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
                    busy := true;
                    exit;
                when others then
                    get stacked diagnostics objects = pg_exception_detail;
                    failure := coalesce(failure, format('%s: %s', name, sqlerrm)
                        || case when sqlstate = '2BP01' then coalesce(' (' || objects || ')', '') else '' end);
            end;
        end loop;
        begin
            delete from rota.job_runs_default
            where ctid = any (array(select ctid from rota.job_runs_default where finished_at < now() - keep limit 10000));
        exception
            when lock_not_available then
                busy := true;
            when others then
                failure := coalesce(failure, 'job_runs_default: ' || sqlerrm);
        end;
    end if;
    perform rota.note_housekeeping('ledger_drop', failure, busy);
    return next;
end $$;

-- A piece that found its table locked has neither succeeded nor failed: only its age shows it.
create function rota.note_housekeeping(piece text, failure text, busy boolean default false) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if note_housekeeping.failure is not null or not note_housekeeping.busy then
        insert into rota.housekeeping as known (piece, failed_at, error)
        values (note_housekeeping.piece, case when note_housekeeping.failure is not null then now() end,
                left(note_housekeeping.failure, 1000))
        on conflict (piece) do update
        set succeeded_at = case when excluded.error is null then now() else known.succeeded_at end,
            failed_at = coalesce(excluded.failed_at, known.failed_at),
            error = excluded.error
        -- Every daemon does each piece each minute: one write for all of them is enough.
        where excluded.error is distinct from known.error or known.succeeded_at < now() - interval '30 seconds';
    end if;
end $$;

create function rota.prune_audit(keep interval default interval '400 days', "limit" integer default 1000) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    pruned bigint;
begin
    -- Daemons can't delete from the audit otherwise, and not even so what happened today.
    delete from rota.audit
    where audit_id = any (array(
        select old.audit_id from rota.audit as old
        where old.done_at < now() - greatest(prune_audit.keep, interval '1 day')
        order by old.done_at
        limit prune_audit."limit"
        for update skip locked));
    get diagnostics pruned = row_count;
    return pruned;
end $$;
comment on function rota.prune_audit is 'Delete audit rows older than keep (at least a day), at most limit; returns how many.';

create function rota.forget_node(node_id uuid, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(forget_node.reason);
    place text;
begin
    if exists (select from rota.nodes where node_id = forget_node.node_id and seen_at > now() - interval '15 seconds') then
        raise exception using errcode = 'RT004', message = format('node %s is alive', forget_node.node_id),
            hint = 'Stop the daemon: with SIGTERM it takes itself from the list.';
    end if;
    with listed as (
        delete from rota.nodes where node_id = forget_node.node_id returning host, pid
    ),
    lost as (
        delete from rota.lost_nodes where node_id = forget_node.node_id returning host, pid
    )
    select format('%s:%s', host, pid) into place from (select * from listed union all select * from lost) as gone limit 1;
    if place is null then
        return false;
    end if;
    insert into rota.audit (action, target, reason)
    values ('forget', 'node ' || forget_node.node_id || ' (' || place || ')', why);
    return true;
end $$;
comment on function rota.forget_node is 'Take a daemon that vanished from the list of the lost; false if it is not there.';

revoke all on function rota.note_housekeeping, rota.prune_audit, rota.forget_node from public;
