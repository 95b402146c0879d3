-- Refusals of a cron expression say in SQL what the command line and Python say (src/rota/cron/expression.py): the cure, too.

create or replace function rota.cron_value(field integer, word text) returns integer
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp set standard_conforming_strings = on as $$
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
                message = format('cron: %s %s is outside %s-%s%s', labels[field], word, lows[field], highs[field],
                    case when field = 6 and length(word) = 4 then '; a year field is not supported' else '' end);
        end if;
        return value;
    end if;
    if field = 5 then
        value := array_position('{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'::text[], word);
    elsif field = 6 then
        value := array_position('{sun,mon,tue,wed,thu,fri,sat}'::text[], word) - 1;
    end if;
    if value is null then
        raise exception using errcode = 'check_violation',
            message = format('cron: `%s` is no %s', upper(word collate "C"), labels[field]);
    end if;
    return value;
end $$;

create or replace function rota.is_cron(expression text) returns boolean
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp set standard_conforming_strings = on as $$
declare
    lows integer[] := '{0,0,0,1,1,0}';
    highs constant integer[] := '{59,59,23,31,12,7}';
    sizes constant integer[] := '{60,60,24,31,12,7}';
    labels constant text[] := '{second,minute,hour,day of month,month,weekday}';
    longest constant integer[] := '{31,29,31,30,31,30,31,31,30,31,30,31}';
    month_names constant text[] :=
        '{January,February,March,April,May,June,July,August,September,October,November,December}';
    long_months constant text[] :=
        '{january,february,march,april,may,june,july,august,september,october,november,december}';
    long_weekdays constant text[] := '{sunday,monday,tuesday,wednesday,thursday,friday,saturday}';
    expr text;
    fields text[];
    item text;
    parts text[];
    said text;
    long_name text;
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
        raise exception using errcode = 'check_violation',
            message = format('cron: the expression has %s characters; at most 1000 are read', length(expression));
    end if;
    expr := btrim(expression, E' \t\r\n');
    said := substring(expr from '[^\u0020-\u007e\u0009]');
    if said is not null then
        said := case said when E'\n' then '\n' when E'\r' then '\r'
            else case when ascii(said) < 256 then '\x' || lpad(to_hex(ascii(said)), 2, '0')
                      when ascii(said) < 65536 then '\u' || lpad(to_hex(ascii(said)), 4, '0')
                      else '\U' || lpad(to_hex(ascii(said)), 8, '0') end
        end;
        raise exception using errcode = 'check_violation',
            message = format('cron: the character ''%s'' has no place in an expression', said);
    end if;
    expr := lower(expr collate "C");  -- by Turkish rules, FRI has no dot in small letters either
    if expr in ('@yearly', '@annually', '@monthly', '@weekly', '@daily', '@midnight', '@hourly') then
        return true;
    elsif starts_with(expr, '@') then
        raise exception using errcode = 'check_violation', message = format(
            'cron: `%s` is not supported; the nicknames are @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly%s',
            expr,
            case when starts_with(expr, '@every') then '; for a fixed interval use `every` instead of cron' else '' end);
    end if;
    if position('=' in expr) > 0 then
        raise exception using errcode = 'check_violation',
            message = 'cron: `=` has no place in an expression; the timezone is a setting of its own beside it';
    end if;
    fields := regexp_split_to_array(expr, '[ \t]+');
    if cardinality(fields) = 5 then
        fields := array_prepend('0', fields);
    end if;
    if cardinality(fields) <> 6 then
        raise exception using errcode = 'check_violation', message = format(
            'cron: %s field%s where 5 or 6 are needed: minute hour day month weekday, with seconds in front if you like%s',
            case when expr = '' then 'no' else cardinality(fields)::text end,
            case when expr <> '' and cardinality(fields) = 1 then '' else 's' end,
            case when cardinality(fields) = 7 then '; a year field is not supported' else '' end);
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
                    -- In the right order it is two ranges: from the first value on, and up to the last one.
                    said := '';
                    if parts[3] is null then
                        said := '; write `' || low || case when low < highs[field] then '-' || highs[field] else '' end;
                        lows[field] := case field when 6 then 1 else lows[field] end;
                        said := said || case when high < lows[field] then ''
                                             when high = lows[field] then ',' || high
                                             else ',' || lows[field] || '-' || high end || '`';
                    end if;
                    raise exception using errcode = 'check_violation', message = format('cron: %s: `%s` runs backwards%s',
                        labels[field], upper(item collate "C"), said);
                end if;
                if step not between 1 and sizes[field] then
                    raise exception using errcode = 'check_violation',
                        message = format('cron: %s: the step of `%s` is outside 1-%s', labels[field], item, sizes[field]);
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
            elsif field = 6 and item ~ '^(\d+|[a-z]{3})#\d+$' then
                if split_part(item, '#', 2)::numeric not between 1 and 5 then
                    raise exception using errcode = 'check_violation', message = format(
                        'cron: `%s`: the week of a month is 1-5, or write `%sL` for the last',
                        upper(item collate "C"), upper(split_part(item, '#', 1) collate "C"));
                end if;
                perform rota.cron_value(field, split_part(item, '#', 1));
                weeks := weeks || split_part(item, '#', 2)::integer;
            else
                select min(word collate "C") into long_name
                from regexp_matches(item, '\w+', 'g') as found (words)
                cross join unnest(words) as word
                where word = any (case field when 5 then long_months when 6 then long_weekdays end);
                said := case
                    when long_name is not null
                        then 'names have three letters; write `' || upper(left(long_name, 3) collate "C") || '`'
                    when item = '' then 'there is an empty list item'
                    when item like '%?%' then '`?` is not supported; write `*`'
                    when item ~ '^(\d+w|w\d+|lw|wl)$' then '`W`, the nearest working day, is not supported'
                    when item ~ '^[hr](\W.*)?$'
                        then '`H` and `R` are not supported; write the value (a schedule''s `jitter` spreads the load)'
                    when field = 6 and item = 'l'
                        then '`L` alone is no weekday; the last Friday is `5L` or `L5`, the last day `L` in the day field'
                    when field = 6 and item ~ '[#l]'
                        then 'the third Friday is `5#3`, the last one `5L` or `L5`; nothing else takes `#` or `L`'
                    when field = 4 and item like '%l%'
                        then '`L` is the last day of the month and takes no offset, range or step'
                    when item ~ '^\w+-$' then 'the range has no end'
                    when item ~ '^[+-]\d' then 'a value is a plain number'
                    else 'this is not a value, a range (`1-5`) or a step (`*/5`, `10-50/5`)'
                end;
                raise exception using errcode = 'check_violation', message = format('cron: %s `%s`: %s', labels[field],
                    upper(coalesce(nullif(item, ''), fields[field]) collate "C"), said);
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
    low := (select min(day) from unnest(days) as day);
    if low > (select max(longest[month]) from unnest(months) as month) then
        parts := array(select month_names[month] || ' ' || low
                       from (select distinct month from unnest(months) as month) as listed order by month);
        high := cardinality(parts);
        said := concat_ws(' or ', nullif(array_to_string(parts[:high - 1], ', '), ''), parts[high]);
        raise exception using errcode = 'check_violation',
            message = format('cron: there is no %s, so this would never fire', said);
    end if;
    raise exception using errcode = 'check_violation', message = format(
        'cron: no day is both `%s` as day of month and `%s` as weekday, so this would never fire; both are needed as soon as '
        'one starts with `*`',
        upper(fields[4] collate "C"), upper(fields[6] collate "C"));
end $$;


-- ------------------------------------------------------------------------------------------------------------- enqueue

-- rota.enqueue returns (job_id, created), and a column can't be added to that while its callers run. This is the same with an
-- outcome, and rota.enqueue is now a call of it.
--   created   a job was inserted, and no live job had the unique_key
--   kept      the live job with the unique_key stays as it is: on_conflict is keep, or it is running
--   replaced  the new values took the place of the live job's: in its row, or in a new job if it had been claimed before
create function rota.put_job(
    handler text,
    payload jsonb default null,
    queue text default null,
    run_at timestamptz default null,
    priority integer default null,
    unique_key text default null,
    on_conflict text default null,
    max_attempts integer default null,
    backoff_base interval default null,
    backoff_cap interval default null,
    retry_for interval default null,
    timeout interval default null,
    lease interval default null,
    delivery text default null,
    start_by timestamptz default null,
    idempotency_key text default null,
    meta jsonb default null
) returns table (job_id bigint, created boolean, outcome text)
    language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    fresh bigint;
    taken bigint;
    became text;
begin
    if put_job.handler is null then
        raise exception using errcode = 'RT006', message = 'handler must be given',
            hint = 'rota.handlers lists the names that daemons have registered.';
    end if;
    if put_job.on_conflict not in ('keep', 'replace', 'error') then
        raise exception using errcode = 'RT006',
            message = format('on_conflict must be keep, replace or error, not %L', left(put_job.on_conflict, 40)),
            hint = 'keep (the default) leaves the live job with this unique_key alone, replace rewrites it unless it runs, '
                   'error raises RT005.';
    end if;

    -- The insert waits for a transaction that has inserted or deleted the same key. By the time of the lookup that job may have
    -- ended: then the key is free, and the insert is tried again.
    for turn in 1..20 loop
        insert into rota.jobs (handler, payload, queue, run_at, priority, unique_key, max_attempts, backoff_base, backoff_cap,
            retry_for, timeout, lease, delivery, start_by, idempotency_key, meta)
        values (put_job.handler, put_job.payload, put_job.queue, put_job.run_at, put_job.priority, put_job.unique_key,
            put_job.max_attempts, put_job.backoff_base, put_job.backoff_cap, put_job.retry_for, put_job.timeout,
            put_job.lease, put_job.delivery, put_job.start_by, put_job.idempotency_key, put_job.meta)
        on conflict (handler, unique_key) where unique_key is not null do nothing
        returning job_id into fresh;
        if fresh is not null then
            return query select fresh, true, case when became = 'gone' then 'replaced' else 'created' end;
            return;
        end if;

        select job_id into taken from rota.jobs where handler = put_job.handler and unique_key = put_job.unique_key;
        continue when taken is null;

        if put_job.on_conflict = 'error' then
            raise exception using errcode = 'RT005',
                message = format('live job %s of handler %s already has this unique_key', taken, put_job.handler),
                hint = 'Wait until that job has ended, cancel it, or say on_conflict => ''keep'' or ''replace''.';
        elsif put_job.on_conflict = 'replace' then
            became := rota.replace_job(taken, put_job.payload, put_job.queue, put_job.run_at, put_job.priority,
                put_job.max_attempts, put_job.backoff_base, put_job.backoff_cap, put_job.retry_for, put_job.timeout,
                put_job.lease, put_job.delivery, put_job.start_by, put_job.idempotency_key, put_job.meta);
            continue when became = 'gone';
        end if;
        return query select taken, false, case when became = 'rewritten' then 'replaced' else 'kept' end;
        return;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('the unique_key of this job of handler %s changed hands too often to be taken or found',
            put_job.handler),
        hint = 'Nothing was inserted: try again.';
end $$;
comment on function rota.put_job is
    'rota.enqueue with an outcome: created, kept (also: replace was asked for, and the job is running) or replaced.';

create or replace function rota.enqueue(
    handler text,
    payload jsonb default null,
    queue text default null,
    run_at timestamptz default null,
    priority integer default null,
    unique_key text default null,
    on_conflict text default null,
    max_attempts integer default null,
    backoff_base interval default null,
    backoff_cap interval default null,
    retry_for interval default null,
    timeout interval default null,
    lease interval default null,
    delivery text default null,
    start_by timestamptz default null,
    idempotency_key text default null,
    meta jsonb default null
) returns table (job_id bigint, created boolean)
    language sql set search_path = pg_catalog, pg_temp as $$
    select put.job_id, put.created
    from rota.put_job(
        enqueue.handler, enqueue.payload, enqueue.queue, enqueue.run_at, enqueue.priority, enqueue.unique_key,
        enqueue.on_conflict, enqueue.max_attempts, enqueue.backoff_base, enqueue.backoff_cap, enqueue.retry_for,
        enqueue.timeout, enqueue.lease, enqueue.delivery, enqueue.start_by, enqueue.idempotency_key, enqueue.meta) as put
$$;

revoke all on function rota.put_job from public;
-- Roles get their rights anew after the migrations; until then, callers of rota.enqueue need this one.
do $$
declare
    each record;
begin
    for each in
        select granted.grantee::regrole as grantee
        from pg_proc cross join aclexplode(proacl) as granted
        where oid = 'rota.enqueue'::regproc and granted.grantee <> 0
    loop
        execute format('grant execute on function rota.put_job to %s', each.grantee);
    end loop;
end $$;


-- ------------------------------------------------------------------------------------------------- acting on everything

create function rota.described_schedules(handler text, owner text, name_like text) returns text
    language sql immutable
    return 'schedules: ' || coalesce(nullif(concat_ws(', ', 'handler ' || handler, 'owner ' || owner, 'name like ' || name_like), ''),
        'all');

create function rota.pause_schedules(
    handler text default null,
    owner text default null,
    name_like text default null,
    resume_at timestamptz default null,
    "limit" integer default null,
    reason text default null
) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(pause_schedules.reason);
    most integer := rota.bounded_limit(pause_schedules."limit");
    changed bigint;
begin
    -- The clocks, too: the trigger on the definitions updates them, and one locked row would make the whole batch wait.
    with picked as materialized (
        select schedule_id
        from rota.schedule_definitions
        join rota.schedule_clocks using (schedule_id)
        where not paused
          and (pause_schedules.handler is null or handler = pause_schedules.handler)
          and (pause_schedules.owner is null or owner = pause_schedules.owner)
          and (pause_schedules.name_like is null or name like pause_schedules.name_like)
        order by schedule_id
        limit most
        for update skip locked
    )
    update rota.schedule_definitions set paused = true, resume_at = pause_schedules.resume_at
    where schedule_id = any (array(select schedule_id from picked));
    get diagnostics changed = row_count;
    if changed > 0 then
        insert into rota.audit (action, target, reason, affected)
        values ('pause', rota.described_schedules(pause_schedules.handler, pause_schedules.owner, pause_schedules.name_like),
            why, changed);
    end if;
    return changed;
end $$;
comment on function rota.pause_schedules is
    'Pause schedules of a handler, an owner, a name (LIKE), or all, at most limit (1000); returns how many: call again until 0.';

create function rota.resume_schedules(
    handler text default null,
    owner text default null,
    name_like text default null,
    paused_since timestamptz default null,
    "limit" integer default null,
    reason text default null
) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(resume_schedules.reason);
    most integer := rota.bounded_limit(resume_schedules."limit");
    changed bigint;
begin
    with picked as materialized (
        select schedule_id
        from rota.schedule_definitions
        join rota.schedule_clocks using (schedule_id)
        where paused
          and (resume_schedules.handler is null or handler = resume_schedules.handler)
          and (resume_schedules.owner is null or owner = resume_schedules.owner)
          and (resume_schedules.name_like is null or name like resume_schedules.name_like)
          and (resume_schedules.paused_since is null or paused_at >= resume_schedules.paused_since)
        order by schedule_id
        limit most
        for update skip locked
    )
    update rota.schedule_definitions set paused = false, resume_at = null
    where schedule_id = any (array(select schedule_id from picked));
    get diagnostics changed = row_count;
    if changed > 0 then
        insert into rota.audit (action, target, reason, affected)
        values ('resume', rota.described_schedules(resume_schedules.handler, resume_schedules.owner, resume_schedules.name_like),
            why, changed);
    end if;
    return changed;
end $$;
comment on function rota.resume_schedules is
    'Resume paused schedules, of all or those paused since an instant, at most limit (1000); returns how many: call again until 0.';

-- For rota schedule list and the two functions above: by owner, by handler, by the beginning of the name.
create index list_schedules_by_owner_idx on rota.schedule_definitions (owner, name) where owner is not null;
create index list_schedules_by_handler_idx on rota.schedule_definitions (handler, name);
create index list_schedules_by_name_idx on rota.schedule_definitions (name text_pattern_ops);

-- before alone selects jobs, too: before => 'infinity' cancels every live job. Nothing else of the function changes.
do $$
declare
    known constant text := 'if coalesce(cancel_many.handler, cancel_many.queue) is null then';
    known_hint constant text := 'To stop everything, say rota.pause_queue(''''*'''').';
    body text := pg_get_functiondef('rota.cancel_many(text, text, timestamptz, integer, text)'::regprocedure);
begin
    if position(known in body) = 0 then
        raise exception 'rota.cancel_many is not as the migration expects it';
    end if;
    body := replace(body, known, 'if coalesce(cancel_many.handler, cancel_many.queue, cancel_many.before::text) is null then');
    body := replace(body, known_hint, known_hint || ' before => ''''infinity'''' cancels every live job.');
    execute replace(body, 'handler or queue must be given', 'a handler, queue or before must be given');
end $$;


-- ------------------------------------------------------------------------------------------------------ redriven jobs

alter table rota.attempts
    add column redriven_at timestamptz,
    add column redriven_by text,
    add column dead_reason text;

-- By a trigger, so that every way back is recorded: a dead letter whose job is live after the statement was redriven.
create function rota.record_redrives() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update rota.attempts as tried
    set redriven_at = clock_timestamp(), redriven_by = rota.caller(), dead_reason = gone.reason
    from gone
    join rota.jobs as live on live.job_id = gone.job_id
    where tried.job_id = gone.job_id
      and tried.fence_token = gone.fence_token;
    return null;
end $$;
create trigger record_redrives after delete on rota.dead_letters
    referencing old table as gone
    for each statement execute function rota.record_redrives();

revoke all on function rota.described_schedules, rota.pause_schedules, rota.resume_schedules, rota.record_redrives from public;
