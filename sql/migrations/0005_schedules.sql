-- Schedules, their clocks, and the fires: the decision about each due instant.
--
-- The columns that people write and the columns that every fire changes are in two tables: otherwise each fire would write the row
-- with its payload again. The view rota.schedules shows both as one row, and is the only name that people use.

create table rota.schedule_definitions (
    schedule_id     bigint generated always as identity primary key,
    name            text not null unique
        constraint "name must be a name of 1 to 200 characters on one line" check (rota.is_name(name)),
    cron            text
        constraint "cron must be a valid expression" check (rota.is_cron(cron)),
    every           interval
        constraint "every must lie between 1 second and 366 days, without months" check (rota.is_duration(every) and every >= interval '1 second'),
    timezone        text not null default 'UTC'
        constraint "timezone must be a name such as Europe/Vienna" check (timezone ~ '^[A-Za-z][A-Za-z0-9_+/-]{0,63}$'),

    handler         text not null
        constraint "handler must be a name of 1 to 200 characters on one line" check (rota.is_name(handler)),
    payload         jsonb not null default '{}'
        constraint "payload must be at most 1 MiB as text, nest at most 100 deep"
            check (case
                when octet_length(payload::text) < 200 then true
                when octet_length(payload::text) > 1048576 then false
                else not jsonb_path_exists(payload, 'strict $.**{101}') end),
    queue           text
        constraint "queue must be a name of 1 to 200 characters on one line" check (rota.is_name(queue)),
    priority        smallint not null default 5
        constraint "priority must lie between 0 (first) and 9 (last)" check (priority between 0 and 9),
    max_attempts    integer
        constraint "max_attempts must lie between 1 and 1000" check (max_attempts between 1 and 1000),
    backoff_base    interval
        constraint "backoff_base must be positive, at most 366 days, without months" check (rota.is_duration(backoff_base)),
    backoff_cap     interval
        constraint "backoff_cap must be positive, at most 366 days, without months" check (rota.is_duration(backoff_cap)),
    retry_for       interval
        constraint "retry_for must be positive, at most 366 days, without months" check (rota.is_duration(retry_for)),
    timeout         interval
        constraint "timeout must be positive, at most 366 days, without months" check (rota.is_duration(timeout)),
    lease           interval
        constraint "lease must lie between 3 seconds and 1 day" check (lease between interval '3 seconds' and interval '1 day' and rota.is_duration(lease)),
    delivery        text
        constraint "delivery must be at_least_once or at_most_once" check (delivery in ('at_least_once', 'at_most_once')),
    start_within    interval
        constraint "start_within must be positive, at most 366 days, no months" check (rota.is_duration(start_within)),
    meta            jsonb
        constraint "meta must be an object of at most 64 KiB" check (jsonb_typeof(meta) = 'object' and octet_length(meta::text) <= 65536),

    start_at        timestamptz
        constraint "start_at must lie between the years 1970 and 2200" check (start_at >= timestamptz '1970-01-01 00:00:00+00' and start_at < timestamptz '2200-01-01 00:00:00+00'),
    end_at          timestamptz
        constraint "end_at must lie between the years 1970 and 2200" check (end_at >= timestamptz '1970-01-01 00:00:00+00' and end_at < timestamptz '2200-01-01 00:00:00+00'),
    paused          boolean not null default false,
    resume_at       timestamptz
        constraint "resume_at must lie between the years 1970 and 2200" check (resume_at >= timestamptz '1970-01-01 00:00:00+00' and resume_at < timestamptz '2200-01-01 00:00:00+00'),
    misfire         text not null default 'latest'
        constraint "misfire must be latest, skip or all" check (misfire in ('latest', 'skip', 'all')),
    on_time_within  interval not null default interval '60 seconds'
        constraint "on_time_within must be positive, at most 366 days, no months" check (rota.is_duration(on_time_within)),
    too_late_after  interval
        constraint "too_late_after must be positive, at most 366 days, no months" check (rota.is_duration(too_late_after)),
    catch_up_limit  integer not null default 100
        constraint "catch_up_limit must lie between 1 and 1000" check (catch_up_limit between 1 and 1000),
    overlap         text not null default 'skip'
        constraint "overlap must be skip, allow, queue_one or replace" check (overlap in ('skip', 'allow', 'queue_one', 'replace')),
    dst_gap         text not null default 'after'
        constraint "dst_gap must be after or skip" check (dst_gap in ('after', 'skip')),
    dst_fold        text not null default 'first'
        constraint "dst_fold must be first or both" check (dst_fold in ('first', 'both')),
    jitter          interval not null default interval '0'
        constraint "jitter must lie between 0 and 366 days, without months" check (jitter = interval '0' or rota.is_duration(jitter))
        -- An interval of value 0 passes the check above, whatever its parts.
        constraint "jitter must have no negative parts"
            check (jitter <> interval '0'
                   or extract(year from jitter) = 0 and extract(month from jitter) = 0 and extract(day from jitter) = 0),

    expect_success_within interval
        constraint "expect_success_within must be positive, at most 366 days" check (rota.is_duration(expect_success_within)),
    description     text
        constraint "description must have at most 2000 characters" check (length(description) <= 2000),
    owner           text
        constraint "owner must be a name of 1 to 200 characters on one line" check (rota.is_name(owner)),
    declared_by     text
        constraint "declared_by must be a name of 1 to 200 characters on one line" check (rota.is_name(declared_by)),
    declared        jsonb
        constraint "declared must be an object of at most 64 KiB" check (jsonb_typeof(declared) = 'object' and octet_length(declared::text) <= 65536),

    created_at      timestamptz not null default clock_timestamp(),
    created_by      text not null,
    edited_at       timestamptz not null default clock_timestamp(),
    paused_at       timestamptz,

    constraint "exactly one of cron and every must be given" check (num_nonnulls(cron, every) = 1),
    constraint "end_at must lie after start_at" check (end_at > start_at),
    constraint "resume_at needs paused" check (paused or resume_at is null)
) with (fillfactor = 90);
comment on table rota.schedule_definitions is 'The columns of schedules that people write, through the view rota.schedules.';
comment on column rota.schedule_definitions.edited_at is 'The last edit that changed when the schedule fires. The next fire lies strictly after it.';

-- For rota schedule list, rota.pause_schedules() and rota.resume_schedules(), which filter by owner, handler and start of the name.
create index list_schedules_by_owner_idx on rota.schedule_definitions (owner, name) where owner is not null;
create index list_schedules_by_handler_idx on rota.schedule_definitions (handler, name);
create index list_schedules_by_name_idx on rota.schedule_definitions (name text_pattern_ops);
-- Reports count the paused and the watched schedules through these indexes. Of the other schedules they need only the total.
create index count_paused_schedules_idx on rota.schedule_definitions (schedule_id) where paused;
create index sample_watched_schedules_idx on rota.schedule_definitions (schedule_id) where expect_success_within is not null;

-- No index begins with shard: a daemon would scan it once for each of its shards, up to 256 times.
create table rota.schedule_clocks (
    schedule_id           bigint primary key,
    next_fire_at          timestamptz,
    last_fire_at          timestamptz,
    last_success_at       timestamptz,
    version               bigint not null default 1,
    paused_from           timestamptz,
    consecutive_failures  integer not null default 0,
    shard                 smallint not null generated always as ((schedule_id % 256)::smallint) stored,
    invalid_reason        text,
    constraint "no instant is decided twice" check (next_fire_at > last_fire_at or next_fire_at = timestamptz '-infinity')
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off
);
comment on table rota.schedule_clocks is
    'The columns of schedules that daemons and triggers write, one narrow row each. next_fire_at: the first instant that is not '
    'decided yet; -infinity: to be computed; NULL: none (paused, invalid or ended). version grows with every edit of when it fires.';
-- schedule_id lets a query continue where the last one stopped, even among thousands that are due at the same instant.
create index take_due_schedules_idx on rota.schedule_clocks (next_fire_at, schedule_id) where next_fire_at is not null;
create index revive_invalid_schedules_idx on rota.schedule_clocks (schedule_id) where invalid_reason is not null;
create index count_stopped_schedules_idx on rota.schedule_clocks (schedule_id) where next_fire_at is null;

create table rota.fires (
    scheduled_for   timestamptz not null,
    decided_at      timestamptz not null default clock_timestamp(),
    schedule_id     bigint not null,
    job_id          bigint,
    missed_from     timestamptz,
    missed_count    integer,
    replaces        boolean,
    disposition     text not null
        constraint "disposition must be one of the ten"
            check (disposition in ('enqueued', 'waiting', 'replaced', 'run_now', 'skipped_misfire', 'skipped_overlap',
                                   'skipped_gap', 'skipped_paused', 'skipped_edit', 'skipped_deleted')),
    name            text not null,
    note            text,
    -- In this order the fires of one instant are on few pages. In the reverse order each fire would touch its own page.
    primary key (scheduled_for, schedule_id)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.05);
comment on table rota.fires is
    'The decision about each due instant of each schedule. A row with missed_from covers all instants from missed_from to '
    'scheduled_for, missed_count of them (NULL: more than 1000, or not counted). Rows outlive the schedule.';
-- With misfire all and overlap replace, several caught-up fires wait in turn, and only one of them replaces the live job.
comment on column rota.fires.replaces is 'True: this fire asked the live job to cancel, and waits until that job ends.';
create index promote_waiting_fires_idx on rota.fires (schedule_id, scheduled_for) where disposition = 'waiting';
-- For the history of one schedule. An index by schedule_id would touch one page for each fire of an instant. In this index the fires of
-- one day are together, and the history costs one probe for each day that fires are kept.
-- The entry is one number: the UTC day and the lowest 40 bits of schedule_id. A reader must compare the whole schedule_id too. With two
-- columns, a plan made while the table is empty would use this index instead of the primary key, and later scan all of it.
create index list_fires_idx on rota.fires (
    ((((scheduled_for at time zone 'UTC')::date - date '1970-01-01')::int8 << 40) | (schedule_id & 1099511627775))
);

-- The columns that people write come from the table in FROM and are updatable. The others are subqueries and so read-only.
-- With a single table in FROM, INSERT … ON CONFLICT, UPDATE, DELETE and RETURNING work without a trigger.
create view rota.schedules as
select schedule_id, name, cron, every, timezone,
    handler, payload, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery,
    start_within, meta,
    start_at, end_at, paused, resume_at, misfire, on_time_within, too_late_after, catch_up_limit, overlap, dst_gap, dst_fold,
    jitter,
    description, owner, declared_by, declared, expect_success_within,
    created_at, created_by, edited_at, paused_at,
    (select nullif(next_fire_at, '-infinity') from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as next_fire_at,
    (select last_fire_at from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as last_fire_at,
    (select last_success_at from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as last_success_at,
    (select consecutive_failures from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as consecutive_failures,
    (select invalid_reason from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as invalid_reason,
    (select version from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as version,
    (select case
         when invalid_reason is not null then 'invalid'
         when paused then 'paused'
         when next_fire_at is null then 'ended'
         -- -infinity means to be computed, which daemons should do right after the edit.
         when coalesce(nullif(next_fire_at, '-infinity'), edited_at) < now() - interval '30 seconds' then 'overdue'
         else 'ok' end
     from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as state
from rota.schedule_definitions as definition;
-- Only daemons and the owner may DELETE through the view: a login with DELETE may lock the tables beneath it.
comment on view rota.schedules is
    'All schedules. INSERT and UPDATE freely, and remove with rota.remove_schedule(): daemons notice at once. NULL means the default. state: ok, invalid, '
    'paused, overdue (due for 30 s without a decision) or ended.';


-- ------------------------------------------------------------------------------------------------------------ triggers

create function rota.fill_in_schedule() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    effective_at timestamptz := clock_timestamp();
begin
    -- ORMs send explicit NULLs, so a column's DEFAULT is not enough.
    new.timezone := coalesce(new.timezone, 'UTC');
    new.payload := coalesce(new.payload, '{}');
    new.priority := coalesce(new.priority, 5);
    new.paused := coalesce(new.paused, false);
    new.misfire := coalesce(new.misfire, 'latest');
    new.on_time_within := coalesce(new.on_time_within, interval '60 seconds');
    new.catch_up_limit := coalesce(new.catch_up_limit, 100);
    new.overlap := coalesce(new.overlap, 'skip');
    new.dst_gap := coalesce(new.dst_gap, 'after');
    new.dst_fold := coalesce(new.dst_fold, 'first');
    new.jitter := coalesce(new.jitter, interval '0');
    if tg_op = 'INSERT' then
        new.created_at := coalesce(new.created_at, effective_at);
        new.edited_at := coalesce(new.edited_at, new.created_at);
        new.created_by := coalesce(new.created_by, rota.caller());
        new.paused_at := case when new.paused then new.edited_at end;
        return new;
    end if;
    new.created_at := coalesce(new.created_at, old.created_at);
    new.created_by := coalesce(new.created_by, old.created_by);
    new.schedule_id := old.schedule_id;
    if new.paused and not old.paused then
        new.paused_at := effective_at;
    elsif not new.paused and old.paused then
        -- If no daemon ran at resume_at, the pause still ends at resume_at, and later instants count as missed.
        effective_at := case when old.resume_at between old.edited_at and effective_at then old.resume_at else effective_at end;
        new.resume_at := null;
        new.paused_at := null;
    end if;
    if new.edited_at is not distinct from old.edited_at and
       (new.cron, new.every, new.timezone, new.start_at, new.end_at, new.paused, new.dst_gap, new.dst_fold)
       is distinct from
       (old.cron, old.every, old.timezone, old.start_at, old.end_at, old.paused, old.dst_gap, old.dst_fold) then
        new.edited_at := effective_at;
    end if;
    new.edited_at := coalesce(new.edited_at, old.edited_at);
    return new;
end $$;

create trigger fill_in before insert or update on rota.schedule_definitions
    for each row execute function rota.fill_in_schedule();

create trigger note_server before insert on rota.schedule_definitions for each statement
    when (current_setting('rota.server_noted', true) is distinct from 'on')
    execute function rota.note_server_of_session();

-- Notify the daemons that wait for jobs (see rota.wake_dispatchers()): they also plan schedules. With this payload they skip the query
-- for jobs.
create function rota.wake_schedulers() returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not (pg_try_advisory_lock(1919906913, 1) and pg_advisory_unlock(1919906913, 1)) then
        perform rota.tell('rota_wake', 'schedules');
    end if;
end $$;

create function rota.start_clocks() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into rota.schedule_clocks (schedule_id, next_fire_at)
    select schedule_id, case when not paused then timestamptz '-infinity' else resume_at end
    from new_schedules;
    perform rota.wake_schedulers();
    return null;
end $$;

create trigger start_clocks after insert on rota.schedule_definitions
    referencing new table as new_schedules for each statement execute function rota.start_clocks();

-- Record the due instants that are not decided yet, from next_fire_at on, as one row. A paused schedule has no due instants.
create function rota.record_undecided(
    definition rota.schedule_definitions, next_fire_at timestamptz, disposition text, note text
) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    first_instant timestamptz := record_undecided.next_fire_at;
    until timestamptz := clock_timestamp();
    later_count bigint := 0;
    note text := record_undecided.note;
begin
    if first_instant is null or first_instant = '-infinity' or first_instant > until or definition.paused then
        return;
    end if;
    if definition.every is not null then
        later_count := floor(extract(epoch from least(until, definition.end_at - interval '1 microsecond') - first_instant)
                             / extract(epoch from definition.every));
    else
        -- Only daemons can count the instants of a cron expression.
        note := concat_ws('; ', note, 'covers every instant until ' || until);
    end if;
    insert into rota.fires (scheduled_for, schedule_id, name, disposition, missed_from, missed_count, decided_at, note)
    values (
        -- In seconds, because an added day has the length of that day in the session's timezone.
        first_instant + make_interval(secs => (later_count * extract(epoch from coalesce(definition.every, '0')))::double precision),
        definition.schedule_id, definition.name, record_undecided.disposition, first_instant,
        case when definition.every is not null and later_count < 1000 then later_count + 1 end, until, note)
    on conflict do nothing;
end $$;

-- After an edit of when a schedule fires: record the due instants that are not decided yet, raise the version so that concurrent
-- decisions are rejected, and let daemons plan the next fire. The lock on the clock orders this edit and the decisions.
create function rota.replan_schedule() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    clock rota.schedule_clocks;
begin
    select * into clock from rota.schedule_clocks where schedule_id = new.schedule_id for update;
    perform rota.record_undecided(old, clock.next_fire_at,
        case when new.paused then 'skipped_paused' else 'skipped_edit' end,
        case when new.paused then 'paused' else 'edited' end || ' by ' || rota.caller());
    if new.paused and not old.paused then
        update rota.fires
        set disposition = 'skipped_paused', decided_at = clock_timestamp(), note = 'it waited when the schedule was paused'
        where schedule_id = new.schedule_id and disposition = 'waiting';
    end if;
    update rota.schedule_clocks
    set version = version + 1,
        next_fire_at = case when not new.paused then timestamptz '-infinity'
            when new.resume_at is not null then greatest(new.resume_at, last_fire_at + interval '1 microsecond') end,
        paused_from = case when old.paused and not new.paused then old.paused_at else paused_from end,
        invalid_reason = null
    where schedule_id = new.schedule_id;
    perform rota.wake_schedulers();
    return null;
end $$;

create trigger replan after update of cron, every, timezone, start_at, end_at, paused, resume_at, dst_gap, dst_fold
    on rota.schedule_definitions for each row
    when ((new.cron, new.every, new.timezone, new.start_at, new.end_at, new.paused, new.resume_at, new.dst_gap, new.dst_fold)
          is distinct from
          (old.cron, old.every, old.timezone, old.start_at, old.end_at, old.paused, old.resume_at, old.dst_gap, old.dst_fold))
    execute function rota.replan_schedule();

create function rota.stop_clock() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    clock rota.schedule_clocks;
begin
    delete from rota.schedule_clocks where schedule_id = old.schedule_id returning * into clock;
    perform rota.record_undecided(old, clock.next_fire_at, 'skipped_deleted', 'removed by ' || rota.caller());
    update rota.fires
    set disposition = 'skipped_deleted', decided_at = clock_timestamp(), note = 'it waited when the schedule was removed'
    where schedule_id = old.schedule_id and disposition = 'waiting';
    return null;
end $$;

create trigger stop_clock after delete on rota.schedule_definitions
    for each row execute function rota.stop_clock();

create function rota.stop_all_clocks() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from rota.schedule_clocks;
    update rota.fires
    set disposition = 'skipped_deleted', decided_at = clock_timestamp(), note = 'it waited when the table was truncated'
    where disposition = 'waiting';
    return null;
end $$;

create trigger stop_all_clocks after truncate on rota.schedule_definitions
    for each statement execute function rota.stop_all_clocks();
