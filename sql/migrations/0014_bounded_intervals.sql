-- Refuse intervals whose parts have different signs, and bound those that are stored already.

-- PostgreSQL compares intervals by value, so '106751000 days -2562023976 hours' counts as 24 hours. But it adds the days before the
-- hours, which overflows: `scheduled_for + retry_for` then fails in every statement that meets the row.
create or replace function rota.is_duration(value interval) returns boolean
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

-- For statements that compute with stored intervals. Rows from before this migration, rows that were restored, and rows that an
-- owner wrote without the constraints may hold any interval.
create function rota.bounded_duration(value interval) returns interval
    language sql immutable parallel safe
    return case when value is not null then pg_catalog.make_interval(
        secs => least(greatest(extract(epoch from value), 0.000001), 31622400)::double precision
    ) end;
comment on function rota.bounded_duration is
    'The same length of time without days and months, between 1 microsecond and 366 days: added to an instant of this century, it never overflows.';
revoke all on function rota.bounded_duration(interval) from public;

-- An interval of value 0 passes "jitter must lie between 0 and 366 days, without months", whatever its parts.
alter table rota.schedule_definitions add constraint "jitter must have no negative parts"
    check (jitter <> interval '0'
           or extract(year from jitter) = 0 and extract(month from jitter) = 0 and extract(day from jitter) = 0) not valid;

create or replace function rota.jitter_offset(schedule_id bigint, jitter interval) returns interval
    language sql immutable strict parallel safe
    return case when jitter = interval '0' then interval '0'
        else interval '1 microsecond' * (
            ('x' || left(encode(sha256(schedule_id::text::bytea), 'hex'), 15))::bit(60)::bigint
            % least(greatest(extract(epoch from jitter), 0.000001) * 1000000, 31622400000000)::bigint) end;

-- Stored rows keep the length of their intervals. Locked rows are skipped: the migration must not wait for another session. A row
-- that breaks another constraint stays as it is.
do $$
declare
    found bigint;
begin
    for found in
        select job_id from rota.jobs
        where rota.is_duration(backoff_base) is false or rota.is_duration(backoff_cap) is false
           or rota.is_duration(retry_for) is false or rota.is_duration(timeout) is false or rota.is_duration(lease) is false
        for update skip locked
    loop
        begin
            update rota.jobs
            set backoff_base = rota.bounded_duration(backoff_base), backoff_cap = rota.bounded_duration(backoff_cap),
                retry_for = rota.bounded_duration(retry_for), timeout = rota.bounded_duration(timeout),
                lease = rota.bounded_duration(lease)
            where job_id = found;
        exception when check_violation then
            null;
        end;
    end loop;
    for found in
        select schedule_id from rota.schedule_definitions
        where rota.is_duration(every) is false or rota.is_duration(on_time_within) is false
           or rota.is_duration(too_late_after) is false or rota.is_duration(expect_success_within) is false
           or rota.is_duration(start_within) is false or rota.is_duration(backoff_base) is false
           or rota.is_duration(backoff_cap) is false or rota.is_duration(retry_for) is false
           or rota.is_duration(timeout) is false or rota.is_duration(lease) is false
           or rota.is_duration(jitter) is false and jitter::text <> interval '0'::text
        for update skip locked
    loop
        begin
            update rota.schedule_definitions
            set every = rota.bounded_duration(every), on_time_within = rota.bounded_duration(on_time_within),
                too_late_after = rota.bounded_duration(too_late_after),
                expect_success_within = rota.bounded_duration(expect_success_within),
                start_within = rota.bounded_duration(start_within), backoff_base = rota.bounded_duration(backoff_base),
                backoff_cap = rota.bounded_duration(backoff_cap), retry_for = rota.bounded_duration(retry_for),
                timeout = rota.bounded_duration(timeout), lease = rota.bounded_duration(lease),
                jitter = case when jitter <> interval '0' then rota.bounded_duration(jitter) else interval '0' end
            where schedule_id = found;
        exception when check_violation then
            null;
        end;
    end loop;
end $$;

-- One dead letter that breaks a constraint of rota.jobs keeps no other of a redrive_many() from going back.
create or replace function rota.redrive_many(
    handler text default null,
    queue text default null,
    reason text default null,
    error_kind text default null,
    before timestamptz default null,
    "limit" integer default null,
    spread interval default null,
    include_at_most_once boolean default null,
    note text default null
) returns table (redriven bigint, left_out bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(redrive_many.note);
    most integer := rota.bounded_limit(redrive_many."limit");
    passed bigint := 0;
    sent bigint := 0;
    stayed bigint := 0;
    batch bigint[];
    each bigint;
    went integer;
begin
    if rota.is_duration(redrive_many.spread) is false then
        raise exception using errcode = 'RT006', message = 'spread must be positive, at most 366 days, without months',
            hint = 'NULL makes all of them due at once.';
    end if;
    loop
        batch := array(
            select job_id from rota.dead_letters
            where job_id > passed
              and (redrive_many.handler is null or handler = redrive_many.handler)
              and (redrive_many.queue is null or queue = redrive_many.queue)
              and (redrive_many.reason is null or reason = redrive_many.reason)
              and (redrive_many.error_kind is null or error_kind = redrive_many.error_kind)
              and (redrive_many.before is null or finished_at < redrive_many.before)
              and (redrive_many.include_at_most_once or delivery is distinct from 'at_most_once')
            order by job_id
            limit most - sent
            for update skip locked);
        exit when batch = '{}';
        begin
            went := cardinality(rota.send_back(batch, null, redrive_many.spread));
        exception when data_exception or integrity_constraint_violation then
            -- One by one: one of them can't be inserted.
            went := 0;
            foreach each in array batch loop
                begin
                    if rota.send_back(array[each], null, null) <> '{}' then
                        update rota.jobs set run_at = now() + redrive_many.spread * (went::double precision / cardinality(batch))
                        where job_id = each and redrive_many.spread is not null;
                        went := went + 1;
                    end if;
                exception when data_exception or integrity_constraint_violation then
                    raise notice 'job % stays a dead letter: %', each, sqlerrm;
                end;
            end loop;
        end;
        sent := sent + went;
        stayed := stayed + cardinality(batch) - went;
        passed := batch[cardinality(batch)];
        exit when sent = most;
    end loop;
    insert into rota.audit (action, target, reason, affected)
    values ('redrive many', coalesce(nullif(concat_ws(', ', 'handler ' || redrive_many.handler, 'queue ' || redrive_many.queue,
        'reason ' || redrive_many.reason, 'error kind ' || redrive_many.error_kind, 'dead before ' || redrive_many.before), ''),
        'all dead letters'), why, sent);
    return query select sent, stayed;
end $$;
