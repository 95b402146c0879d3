-- Validation of cron expressions in SQL. It accepts and refuses the same expressions as src/rota/cron/expression.py, with the same
-- messages; a test compares both. Daemons validate again, and store an error in invalid_reason.
-- Both functions set standard_conforming_strings, because it decides what the backslashes in their patterns mean.

-- One value of a field: a number within its bounds, or a name. Fields are numbered 1 second, 2 minute, 3 hour, 4 day of month,
-- 5 month, 6 weekday.
create function rota.cron_value(field integer, word text) returns integer
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

-- For a CHECK: returns true, or raises an error that says what is wrong.
create function rota.is_cron(expression text) returns boolean
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp set standard_conforming_strings = on as $$
declare
    lows integer[] := '{0,0,0,1,1,0}';
    highs constant integer[] := '{59,59,23,31,12,7}';
    sizes constant integer[] := '{60,60,24,31,12,7}';
    labels constant text[] := '{second,minute,hour,day of month,month,weekday}';
    days_in_month constant integer[] := '{31,29,31,30,31,30,31,31,30,31,30,31}';
    month_names constant text[] :=
        '{January,February,March,April,May,June,July,August,September,October,November,December}';
    long_months constant text[] :=
        '{january,february,march,april,may,june,july,august,september,october,november,december}';
    long_weekdays constant text[] := '{sunday,monday,tuesday,wednesday,thursday,friday,saturday}';
    expr text;
    fields text[];
    item text;
    parts text[];
    detail text;
    long_name text;
    low integer;
    high integer;
    step numeric;
    days integer[] := '{}';      -- of the month; 0 is the last day
    months integer[] := '{}';
    weeks integer[] := '{}';     -- of the month, for weekdays such as 5#3; 0 is the last week
    plain_weekdays boolean := false;
begin
    -- Shortcut: nearly all expressions are plain and pass with one match.
    if expression ~ '^(\*|[0-5]?[0-9]|\*/([1-9]|[1-5][0-9]|60)) (\*|[01]?[0-9]|2[0-3]|\*/([1-9]|1[0-9]|2[0-4])) (\*|0?[1-9]|1[0-9]|2[0-8]) (\*|0?[1-9]|1[0-2]) (\*|[0-7])$' then
        return true;
    end if;
    if length(expression) > 1000 then
        raise exception using errcode = 'check_violation',
            message = format('cron: the expression has %s characters; at most 1000 are read', length(expression));
    end if;
    expr := btrim(expression, E' \t\r\n');
    detail := substring(expr from '[^\u0020-\u007e\u0009]');
    if detail is not null then
        detail := case detail when E'\n' then '\n' when E'\r' then '\r'
            else case when ascii(detail) < 256 then '\x' || lpad(to_hex(ascii(detail)), 2, '0')
                      when ascii(detail) < 65536 then '\u' || lpad(to_hex(ascii(detail)), 4, '0')
                      else '\U' || lpad(to_hex(ascii(detail)), 8, '0') end
        end;
        raise exception using errcode = 'check_violation',
            message = format('cron: the character ''%s'' has no place in an expression', detail);
    end if;
    expr := lower(expr collate "C");  -- in a Turkish locale, lower('FRI') has a dotless i
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
                    -- Suggest two ranges instead: from the first value to the maximum, and from the minimum to the last value.
                    detail := '';
                    if parts[3] is null then
                        detail := '; write `' || low || case when low < highs[field] then '-' || highs[field] else '' end;
                        lows[field] := case field when 6 then 1 else lows[field] end;
                        detail := detail || case when high < lows[field] then ''
                                             when high = lows[field] then ',' || high
                                             else ',' || lows[field] || '-' || high end || '`';
                    end if;
                    raise exception using errcode = 'check_violation', message = format('cron: %s: `%s` runs backwards%s',
                        labels[field], upper(item collate "C"), detail);
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
                detail := case
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
                    upper(coalesce(nullif(item, ''), fields[field]) collate "C"), detail);
            end if;
        end loop;
    end loop;

    -- If a day field starts with a star, both day fields must match. Some combinations never do, such as 0 0 30 2 *.
    if fields[4] not like '*%' and fields[6] not like '*%' then
        return true;
    end if;
    if exists (
        select from unnest(months) as month
        cross join lateral generate_series(days_in_month[month] - (month = 2)::integer, days_in_month[month]) as length
        cross join unnest(days) as listed_day
        cross join lateral (select case listed_day when 0 then length else listed_day end as day) as resolved
        where day <= length
          and (plain_weekdays or (day + 6) / 7 = any (weeks) or (0 = any (weeks) and day > length - 7))
    ) then
        return true;
    end if;
    low := (select min(day) from unnest(days) as day);
    if low > (select max(days_in_month[month]) from unnest(months) as month) then
        parts := array(select month_names[month] || ' ' || low
                       from (select distinct month from unnest(months) as month) as distinct_months order by month);
        high := cardinality(parts);
        detail := concat_ws(' or ', nullif(array_to_string(parts[:high - 1], ', '), ''), parts[high]);
        raise exception using errcode = 'check_violation',
            message = format('cron: there is no %s, so this would never fire', detail);
    end if;
    raise exception using errcode = 'check_violation', message = format(
        'cron: no day is both `%s` as day of month and `%s` as weekday, so this would never fire; both are needed as soon as '
        'one starts with `*`',
        upper(fields[4] collate "C"), upper(fields[6] collate "C"));
end $$;
