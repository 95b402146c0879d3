-- What a schedule rests on may be another one than where it was made: the database's language, the session's
-- timezone, and the zone data of the daemons.

create or replace function rota.is_cron(expression text) returns boolean
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp set standard_conforming_strings = on as $$
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
    expr := lower(expr collate "C");  -- by Turkish rules, FRI has no dot in small letters either
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

-- It adds start_within, and a day of it is 24 hours, whatever timezone the caller has set.
alter function rota.backfill_schedule set timezone = 'UTC';

-- Next fires are stored, and rest on the zone data and the rota that found them. Who comes with others finds them anew.
alter table rota.meta add column planned_with text;
comment on column rota.meta.planned_with is 'With which rota and zone data all next fires were found.';
