-- What recurs, and what became of each of its instants.
--
-- What people write is one table, what changes at every fire another: a fire recorded in a row with a payload would write
-- the payload's page again. rota.schedules is the view in which both are one row, and the only name that people use.


-- ---------------------------------------------------------------------------------------------------- cron expressions

-- One value of a field: a number within its bounds, or a name. field: 1 second … 4 day of month, 5 month, 6 weekday.
create function rota.cron_value(field integer, word text) returns integer
    language plpgsql immutable strict parallel safe as $$
declare
    lows constant integer[] := '{0,0,0,1,1,0}';
    highs constant integer[] := '{59,59,23,31,12,7}';
    labels constant text[] := '{second,minute,hour,day of month,month,weekday}';
    value numeric;
begin
    if word ~ '^[0-9]+$' then
        value := word::numeric;
        if value not between lows[field] and highs[field] then
            raise exception using errcode = 'check_violation',
                message = format('cron: %s %s is outside %s-%s', labels[field], left(word, 20), lows[field], highs[field]);
        end if;
        return value;
    end if;
    if field = 5 then
        value := array_position('{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'::text[], word);
    elsif field = 6 then
        value := array_position('{sun,mon,tue,wed,thu,fri,sat}'::text[], word) - 1;
    end if;
    if value is null then
        raise exception using errcode = 'check_violation', message = format('cron: %L is no %s', left(word, 20), labels[field]);
    end if;
    return value;
end $$;

-- For the CHECK alone: true, or an error of its own that says what is wrong. It accepts and refuses what rota.cron does (a
-- test holds the two together); the daemon's word is the last one, by invalid_reason.
create function rota.is_cron(expression text) returns boolean
    language plpgsql immutable strict parallel safe as $$
declare
    lows constant integer[] := '{0,0,0,1,1,0}';
    highs constant integer[] := '{59,59,23,31,12,7}';
    sizes constant integer[] := '{60,60,24,31,12,7}';
    labels constant text[] := '{second,minute,hour,day of month,month,weekday}';
    longest constant integer[] := '{31,29,31,30,31,30,31,31,30,31,30,31}';
    expr text;
    fields text[];
    item text;
    parts text[];
    low integer;
    high integer;
    step numeric;
    days integer[] := '{}';      -- of the month; 0 is its last one
    months integer[] := '{}';
    weeks integer[] := '{}';     -- of the month, for numbered weekdays; 0 is the last one
    plain_weekdays boolean := false;
begin
    -- The plain ones, nearly all of them, at the price of one match.
    if expression ~ '^(\*|[0-5]?[0-9]|\*/([1-9]|[1-5][0-9]|60)) (\*|[01]?[0-9]|2[0-3]|\*/([1-9]|1[0-9]|2[0-4])) (\*|0?[1-9]|1[0-9]|2[0-8]) (\*|0?[1-9]|1[0-2]) (\*|[0-7])$' then
        return true;
    end if;
    if length(expression) > 1000 then
        raise exception using errcode = 'check_violation', message = 'cron: at most 1000 characters are read';
    end if;
    expr := btrim(expression, E' \t\r\n');
    if expr ~ '[^\u0020-\u007e\u0009]' then
        raise exception using errcode = 'check_violation', message = 'cron: there is a character that has no place in an expression';
    end if;
    expr := lower(expr);
    if expr in ('@yearly', '@annually', '@monthly', '@weekly', '@daily', '@midnight', '@hourly') then
        return true;
    elsif starts_with(expr, '@') then
        raise exception using errcode = 'check_violation',
            message = format('cron: %L is not supported', left(expr, 20)),
            hint = '@yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly are. For an interval, use the column every.';
    end if;
    if position('=' in expr) > 0 then
        raise exception using errcode = 'check_violation', message = 'cron: "=" has no place in an expression',
            hint = 'The timezone is a column of its own.';
    end if;
    fields := regexp_split_to_array(expr, '[ \t]+');
    if cardinality(fields) = 5 then
        fields := array_prepend('0', fields);
    end if;
    if cardinality(fields) <> 6 then
        raise exception using errcode = 'check_violation',
            message = format('cron: %s fields where 5 or 6 are needed', case expr when '' then 0 else cardinality(fields) end),
            hint = 'minute hour day month weekday, with seconds in front if you like.';
    end if;

    for field in 1..6 loop
        foreach item in array string_to_array(fields[field], ',') loop
            parts := regexp_match(item, '^(?:\*|(\d+|[a-z]{3})(?:-(\d+|[a-z]{3}))?)(?:/(\d+))?$');
            if parts is not null then
                low := coalesce(rota.cron_value(field, parts[1]), lows[field]);
                high := case when parts[2] is not null then rota.cron_value(field, parts[2])
                             when parts[1] is not null and parts[3] is null then low
                             else highs[field] end;
                step := coalesce(parts[3], '1')::numeric;
                if low > high then
                    raise exception using errcode = 'check_violation',
                        message = format('cron: the %s range %L runs backwards', labels[field], left(item, 20));
                end if;
                if step not between 1 and sizes[field] then
                    raise exception using errcode = 'check_violation',
                        message = format('cron: the step of the %s %L is outside 1-%s', labels[field], left(item, 20), sizes[field]);
                end if;
                if field = 4 then
                    days := days || array(select generate_series(low, high, step::integer));
                elsif field = 5 then
                    months := months || array(select generate_series(low, high, step::integer));
                elsif field = 6 then
                    plain_weekdays := true;
                end if;
            elsif field = 4 and item = 'l' then
                days := days || 0;
            elsif field = 6 and item ~ '^(l(\d+|[a-z]{3})|(\d+|[a-z]{3})l)$' then
                perform rota.cron_value(field, coalesce(substring(item from '^l(.+)$'), substring(item from '^(.+)l$')));
                weeks := weeks || 0;
            elsif field = 6 and item ~ '^(\d+|[a-z]{3})#0*[1-5]$' then
                perform rota.cron_value(field, split_part(item, '#', 1));
                weeks := weeks || split_part(item, '#', 2)::integer;
            else
                raise exception using errcode = 'check_violation',
                    message = format('cron: the %s %L is not a value, a range (1-5) or a step (*/5, 10-50/5)',
                        labels[field], left(item, 20)),
                    hint = 'L is the last day of the month; 5L or L5 the last Friday, 5#3 the third; ?, W, H and R are not supported.';
            end if;
        end loop;
    end loop;

    -- Where one day field starts with a star both must match, and some combinations never do: 0 0 30 2 *.
    if fields[4] not like '*%' and fields[6] not like '*%' then
        return true;
    end if;
    if exists (
        select from unnest(months) as month
        cross join lateral generate_series(longest[month] - (month = 2)::integer, longest[month]) as length
        cross join unnest(days) as listed
        cross join lateral (select case listed when 0 then length else listed end as day) as one
        where day <= length
          and (plain_weekdays or (day + 6) / 7 = any (weeks) or (0 = any (weeks) and day > length - 7))
    ) then
        return true;
    end if;
    raise exception using errcode = 'check_violation',
        message = 'cron: there is no such day in any year, so this would never fire',
        hint = 'Both day fields must match as soon as one of them starts with *.';
end $$;


-- -------------------------------------------------------------------------------------------------------------- tables

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
        constraint "jitter must lie between 0 and 366 days, without months" check (jitter = interval '0' or rota.is_duration(jitter)),

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
comment on table rota.schedule_definitions is 'What people write of schedules, by way of the view rota.schedules.';
comment on column rota.schedule_definitions.edited_at is 'The last edit that changed when it fires: what comes next lies strictly after it.';

-- Who looks is a matter of shards, what is due is not: a shard in the index would make one look 256.
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
    'What daemons and triggers write of schedules, one narrow row each. next_fire_at: the first instant that is not decided '
    'yet; -infinity: to be planned; NULL: none (paused, invalid, at its end). version grows with every edit of when it fires.';
-- With the schedule_id, a look goes on where the last one stopped, also among the thousands that are due at the same instant.
create index take_due_schedules_idx on rota.schedule_clocks (next_fire_at, schedule_id) where next_fire_at is not null;
create index revive_invalid_schedules_idx on rota.schedule_clocks (schedule_id) where invalid_reason is not null;

create table rota.fires (
    scheduled_for   timestamptz not null,
    decided_at      timestamptz not null default clock_timestamp(),
    schedule_id     bigint not null,
    job_id          bigint,
    missed_from     timestamptz,
    missed_count    integer,
    disposition     text not null
        constraint "disposition must be one of the ten"
            check (disposition in ('enqueued', 'waiting', 'replaced', 'run_now', 'skipped_misfire', 'skipped_overlap',
                                   'skipped_gap', 'skipped_paused', 'skipped_edit', 'skipped_deleted')),
    name            text not null,
    note            text,
    -- In this order a spike writes to few pages; the other way round each fire would touch a page of its own.
    primary key (scheduled_for, schedule_id)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.05);
comment on table rota.fires is
    'What became of each due instant of each schedule. A row with missed_from stands for all instants from that one to '
    'scheduled_for, missed_count of them (NULL: more than 1000, or not counted). Outlives the schedule.';
create index promote_waiting_fires_idx on rota.fires (schedule_id, scheduled_for) where disposition = 'waiting';

-- One statement reads and writes all columns that are people's; what daemons and triggers write are subqueries, and thereby
-- read-only. A single table behind FROM keeps INSERT … ON CONFLICT, UPDATE, DELETE and RETURNING working without a trigger.
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
         -- One that is to be planned has -infinity, and should not have had it for long.
         when coalesce(nullif(next_fire_at, '-infinity'), edited_at) < now() - interval '30 seconds' then 'overdue'
         else 'ok' end
     from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as state
from rota.schedule_definitions as definition;
comment on view rota.schedules is
    'What recurs. INSERT, UPDATE and DELETE as you like: daemons notice at once. NULL means the default. state: ok, invalid, '
    'paused, overdue (an instant has come, and for 30 s nobody has decided about it) or ended.';


-- ------------------------------------------------------------------------------------------------------------ triggers

create function rota.fill_in_schedule() returns trigger language plpgsql as $$
declare
    at timestamptz := clock_timestamp();
begin
    -- ORMs send explicit NULLs, so a column's DEFAULT isn't enough.
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
        new.created_at := coalesce(new.created_at, at);
        new.edited_at := coalesce(new.edited_at, new.created_at);
        new.created_by := coalesce(new.created_by, rota.caller());
        new.paused_at := case when new.paused then new.edited_at end;
        return new;
    end if;
    new.created_at := coalesce(new.created_at, old.created_at);
    new.created_by := coalesce(new.created_by, old.created_by);
    new.schedule_id := old.schedule_id;
    if new.paused and not old.paused then
        new.paused_at := at;
    elsif not new.paused and old.paused then
        -- Its time had come earlier, but nobody was up to see it: then it was paused until then, and what fell due since was missed.
        at := case when old.resume_at between old.edited_at and at then old.resume_at else at end;
        new.resume_at := null;
        new.paused_at := null;
    end if;
    if new.edited_at is not distinct from old.edited_at and
       (new.cron, new.every, new.timezone, new.start_at, new.end_at, new.paused, new.dst_gap, new.dst_fold)
       is distinct from
       (old.cron, old.every, old.timezone, old.start_at, old.end_at, old.paused, old.dst_gap, old.dst_fold) then
        new.edited_at := at;
    end if;
    new.edited_at := coalesce(new.edited_at, old.edited_at);
    return new;
end $$;

create trigger fill_in before insert or update on rota.schedule_definitions
    for each row execute function rota.fill_in_schedule();

-- Those who wait for jobs are those who plan: see rota.wake_dispatchers(). The payload spares them the look at the jobs.
create function rota.wake_schedulers() returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if pg_try_advisory_lock(1919906913, 1) then
        perform pg_advisory_unlock(1919906913, 1);
    else
        perform pg_notify('rota_wake', 'schedules');
    end if;
end $$;

create function rota.start_clocks() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into rota.schedule_clocks (schedule_id, next_fire_at)
    select schedule_id, case when not paused then timestamptz '-infinity' else resume_at end
    from made;
    perform rota.wake_schedulers();
    return null;
end $$;

create trigger start_clocks after insert on rota.schedule_definitions
    referencing new table as made for each statement execute function rota.start_clocks();

-- The instants from next_fire_at on that are due and not decided, as one row; nothing is due while a schedule is paused.
create function rota.record_undecided(
    definition rota.schedule_definitions, next_fire_at timestamptz, disposition text, note text
) returns void
    language plpgsql as $$
declare
    first timestamptz := record_undecided.next_fire_at;
    until timestamptz := clock_timestamp();
    more bigint := 0;
    note text := record_undecided.note;
begin
    if first is null or first = '-infinity' or first > until or definition.paused then
        return;
    end if;
    if definition.every is not null then
        more := floor(extract(epoch from least(until, definition.end_at - interval '1 microsecond') - first)
                      / extract(epoch from definition.every));
    else
        -- How many instants a cron expression has, only the daemons can tell.
        note := concat_ws('; ', note, 'stands for every instant until ' || until);
    end if;
    insert into rota.fires (scheduled_for, schedule_id, name, disposition, missed_from, missed_count, decided_at, note)
    values (
        -- Not more * every: days added to an instant are days of the session's timezone.
        first + make_interval(secs => (more * extract(epoch from coalesce(definition.every, '0')))::double precision),
        definition.schedule_id, definition.name, record_undecided.disposition, first,
        case when definition.every is not null and more < 1000 then more + 1 end, until, note)
    on conflict do nothing;
end $$;

-- An edit of when it fires: what was due and not decided is written down, decisions under way are made void by the version,
-- and what comes next is planned anew. The lock on the clock orders this edit and the daemons' decisions.
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


-- ----------------------------------------------------------------------------------------------------------- functions

-- How much later than its nominal instant a schedule's job runs: always the same for a schedule, spread evenly over all.
create function rota.jitter_offset(schedule_id bigint, jitter interval) returns interval
    language sql immutable strict parallel safe
    return case when jitter = interval '0' then interval '0'
        else interval '1 microsecond' * (
            ('x' || left(encode(sha256(schedule_id::text::bytea), 'hex'), 15))::bit(60)::bigint
            % (extract(epoch from jitter) * 1000000)::bigint) end;

create function rota.find_schedule(name text) returns bigint
    language plpgsql stable as $$
declare
    found_id bigint;
begin
    select schedule_id into found_id from rota.schedule_definitions where schedule_definitions.name = find_schedule.name;
    if found_id is null then
        raise exception using errcode = 'RT002',
            message = format('there is no schedule %L', left(find_schedule.name, 200)),
            hint = 'rota.schedules lists them all, by name.';
    end if;
    return found_id;
end $$;

-- The whole definition at once: what isn't named gets its default, but a pause stays what it is. As its caller.
create function rota.put_schedule(
    name text,
    handler text,
    cron text default null,
    every interval default null,
    timezone text default null,
    payload jsonb default null,
    queue text default null,
    priority integer default null,
    max_attempts integer default null,
    backoff_base interval default null,
    backoff_cap interval default null,
    retry_for interval default null,
    timeout interval default null,
    lease interval default null,
    delivery text default null,
    start_within interval default null,
    meta jsonb default null,
    start_at timestamptz default null,
    end_at timestamptz default null,
    paused boolean default null,
    resume_at timestamptz default null,
    misfire text default null,
    on_time_within interval default null,
    too_late_after interval default null,
    catch_up_limit integer default null,
    overlap text default null,
    dst_gap text default null,
    dst_fold text default null,
    jitter interval default null,
    expect_success_within interval default null,
    description text default null,
    owner text default null
) returns bigint
    language plpgsql as $$
#variable_conflict use_column
declare
    put_id bigint;
begin
    if put_schedule.name is null or put_schedule.handler is null then
        raise exception using errcode = 'RT006', message = 'name and handler must be given',
            hint = 'And exactly one of cron and every.';
    end if;
    insert into rota.schedules as known (name, handler, cron, every, timezone, payload, queue, priority, max_attempts,
        backoff_base, backoff_cap, retry_for, timeout, lease, delivery, start_within, meta, start_at, end_at, paused,
        resume_at, misfire, on_time_within, too_late_after, catch_up_limit, overlap, dst_gap, dst_fold, jitter,
        expect_success_within, description, owner)
    values (put_schedule.name, put_schedule.handler, put_schedule.cron, put_schedule.every, put_schedule.timezone,
        put_schedule.payload, put_schedule.queue, put_schedule.priority, put_schedule.max_attempts,
        put_schedule.backoff_base, put_schedule.backoff_cap, put_schedule.retry_for, put_schedule.timeout,
        put_schedule.lease, put_schedule.delivery, put_schedule.start_within, put_schedule.meta, put_schedule.start_at,
        put_schedule.end_at, put_schedule.paused, put_schedule.resume_at, put_schedule.misfire,
        put_schedule.on_time_within, put_schedule.too_late_after, put_schedule.catch_up_limit, put_schedule.overlap,
        put_schedule.dst_gap, put_schedule.dst_fold, put_schedule.jitter, put_schedule.expect_success_within,
        put_schedule.description, put_schedule.owner)
    on conflict (name) do update
    set handler = excluded.handler, cron = excluded.cron, every = excluded.every, timezone = excluded.timezone,
        payload = excluded.payload, queue = excluded.queue, priority = excluded.priority,
        max_attempts = excluded.max_attempts, backoff_base = excluded.backoff_base, backoff_cap = excluded.backoff_cap,
        retry_for = excluded.retry_for, timeout = excluded.timeout, lease = excluded.lease, delivery = excluded.delivery,
        start_within = excluded.start_within, meta = excluded.meta, start_at = excluded.start_at,
        end_at = excluded.end_at, misfire = excluded.misfire, on_time_within = excluded.on_time_within,
        too_late_after = excluded.too_late_after, catch_up_limit = excluded.catch_up_limit, overlap = excluded.overlap,
        dst_gap = excluded.dst_gap, dst_fold = excluded.dst_fold, jitter = excluded.jitter,
        expect_success_within = excluded.expect_success_within, description = excluded.description,
        owner = excluded.owner,
        paused = coalesce(put_schedule.paused, known.paused),
        resume_at = coalesce(put_schedule.resume_at, known.resume_at)
    returning schedule_id into put_id;
    return put_id;
end $$;
comment on function rota.put_schedule is
    'Insert a schedule, or make the one of that name be as given (NULL: the default; whether it is paused stays, unless named).';

create function rota.remove_schedule(name text, reason text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(remove_schedule.reason);
begin
    delete from rota.schedule_definitions where schedule_id = rota.find_schedule(remove_schedule.name);
    insert into rota.audit (action, target, reason) values ('remove', 'schedule ' || remove_schedule.name, why);
end $$;
comment on function rota.remove_schedule is 'Remove a schedule; its history stays, and so do its live jobs.';

-- Returns whether anything has changed.
create function rota.pause_schedule(
    name text, cancel_live boolean default null, reason text default null, resume_at timestamptz default null
) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(pause_schedule.reason);
    which bigint := rota.find_schedule(pause_schedule.name);
    changed boolean;
    live bigint;
begin
    update rota.schedule_definitions
    set paused = true, resume_at = pause_schedule.resume_at
    where schedule_id = which and (not paused or resume_at is distinct from pause_schedule.resume_at);
    changed := found;
    if changed then
        insert into rota.audit (action, target, reason) values ('pause', 'schedule ' || pause_schedule.name, why);
    end if;
    if pause_schedule.cancel_live then
        for live in select job_id from rota.jobs where schedule_id = which order by job_id loop
            perform rota.cancel(live, note => concat_ws(': ', 'its schedule was paused', why));
        end loop;
    end if;
    return changed;
end $$;
comment on function rota.pause_schedule is
    'Keep a schedule from firing, until resume_at if given; cancel_live also cancels the jobs that it has enqueued.';

create function rota.resume_schedule(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(resume_schedule.reason);
begin
    update rota.schedule_definitions set paused = false, resume_at = null
    where schedule_id = rota.find_schedule(resume_schedule.name) and paused;
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('resume', 'schedule ' || resume_schedule.name, why);
    return true;
end $$;
comment on function rota.resume_schedule is 'Let a paused schedule fire again, at its next instant strictly after now.';

-- Beside whatever else runs, also of a paused schedule; an instant and thereby an idempotency key of its own.
create function rota.run_schedule_now(name text, payload jsonb default null, reason text default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(run_schedule_now.reason);
    which bigint := rota.find_schedule(run_schedule_now.name);
    at timestamptz := clock_timestamp();
    made bigint := nextval(pg_get_serial_sequence('rota.jobs', 'job_id'));
begin
    loop
        -- Between the whole seconds, where no cron expression ever fires.
        if at = date_trunc('second', at) then
            at := at + interval '1 microsecond';
        end if;
        insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id, note)
        values (at, which, run_schedule_now.name, 'run_now', made, rota.signed_note('asked for', why))
        on conflict do nothing;
        exit when found;
        at := at + interval '1 microsecond';
    end loop;
    insert into rota.jobs (job_id, schedule_id, scheduled_for, run_at, start_by, created_by, handler, payload, queue, priority,
        max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta)
    overriding system value
    select made, schedule_id, at, at, at + start_within, rota.caller(), handler, coalesce(run_schedule_now.payload, payload),
        queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta
    from rota.schedule_definitions where schedule_id = which;
    insert into rota.audit (action, target, reason) values ('run now', 'schedule ' || run_schedule_now.name, why);
    return made;
end $$;
comment on function rota.run_schedule_now is 'Enqueue a job of the schedule at once, whatever its clock says, and return its job_id.';

-- Enqueue jobs for instants that are past and did not run, each at most once. Which instants a schedule has had only rota.cron can
-- tell, so they are given: rota schedule backfill does that. An instant with a row of its own is left out; one that was skipped
-- together with others, as a stretch, has none. What is not decided yet is the daemons', and counted as undecided.
create function rota.backfill_schedule(
    name text, instants timestamptz[], run_at timestamptz[] default null, reason text default null,
    out enqueued bigint, out left_out bigint, out undecided bigint
)
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(backfill_schedule.reason);
    which bigint := rota.find_schedule(backfill_schedule.name);
    definition rota.schedule_definitions;
    clock rota.schedule_clocks;
    at timestamptz;
    known bigint;
begin
    if cardinality(backfill_schedule.instants) > 10000 then
        raise exception using errcode = 'RT006', message = 'at most 10000 instants are enqueued at once',
            hint = 'Each call is one transaction: give them in several.';
    end if;
    -- Whoever decides takes the same lock: what is undecided now stays so until the end of this transaction.
    select * into clock from rota.schedule_clocks where schedule_id = which for update;
    select * into definition from rota.schedule_definitions where schedule_id = which;
    at := least(clock_timestamp(), case
        when clock.next_fire_at = '-infinity' then greatest(definition.edited_at, clock.last_fire_at)
        when clock.next_fire_at is not null then clock.next_fire_at - interval '1 microsecond'
        else clock_timestamp() end);
    select count(distinct given.instant), count(distinct given.instant) filter (where given.instant > at)
    into known, undecided
    from unnest(backfill_schedule.instants) as given (instant);
    with wanted as (
        select distinct on (given.instant) given.instant, coalesce(given.run_at, clock_timestamp()) as run_at
        from unnest(backfill_schedule.instants, backfill_schedule.run_at) as given (instant, run_at)
        where given.instant <= at
        order by given.instant, given.run_at
    ),
    missing as materialized (
        select wanted.instant, wanted.run_at, nextval('rota.jobs_job_id_seq') as job_id
        from wanted
        where not exists (
            select from rota.fires as fire
            where fire.scheduled_for = wanted.instant
              and fire.schedule_id = which
              and (fire.missed_from is null or fire.job_id is not null)
        )
    ),
    recorded as (
        insert into rota.fires as fire (scheduled_for, schedule_id, name, disposition, job_id, note)
        select missing.instant, which, definition.name, 'enqueued', missing.job_id, rota.signed_note('backfilled', why)
        from missing
        -- The last instant of a stretch: its row goes on to stand for the others, too.
        on conflict (scheduled_for, schedule_id) do update
        set disposition = excluded.disposition, job_id = excluded.job_id, decided_at = excluded.decided_at,
            note = excluded.note || '; until then ' || fire.disposition || coalesce(' (' || fire.note || ')', '')
        returning fire.job_id
    ),
    made as (
        insert into rota.jobs (job_id, schedule_id, scheduled_for, run_at, start_by, created_by, handler, payload, queue,
            priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta)
        overriding system value
        select missing.job_id, which, missing.instant, missing.run_at, missing.run_at + definition.start_within,
            rota.caller(), definition.handler, definition.payload, definition.queue, definition.priority,
            definition.max_attempts, definition.backoff_base, definition.backoff_cap, definition.retry_for,
            definition.timeout, definition.lease, definition.delivery, definition.meta
        from missing
        where missing.job_id in (select recorded.job_id from recorded)
        order by missing.instant
        returning 1
    )
    select count(*) into enqueued from made;
    left_out := known - undecided - enqueued;
    insert into rota.audit (action, target, reason, affected) values ('backfill', 'schedule ' || definition.name, why, enqueued);
end $$;
comment on function rota.backfill_schedule is
    'Enqueue jobs for past instants of a schedule that did not run, under their true scheduled_for, each at most once. They run '
    'beside each other and beside its other jobs, as far as slots and run_at let them.';

-- True: a job of this fire has succeeded, and the ledger still knows. Also for schedules that have been removed since.
create function rota.ran(schedule text, scheduled_for timestamptz) returns boolean
    language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select exists (
        select from rota.fires
        where fires.scheduled_for = ran.scheduled_for
          and fires.name = ran.schedule
          and exists (select from rota.job_runs where job_runs.job_id = fires.job_id and job_runs.outcome = 'succeeded'))
$$;
comment on function rota.ran is 'Did this fire already run? True when its job has succeeded and is still in the ledger.';

revoke all on all functions in schema rota from public;
