-- A notification is a hint: that none can be sent keeps no job from being inserted, settled or cancelled. And a bound for what lies in one index.

-- One session that listens, on whatever channel of whatever database, and leaves a transaction open keeps the server's one queue of
-- notifications from being emptied. Once it is full, every transaction that would notify fails at its end; and it stays so until
-- somebody asks how full it is, which is what moves its beginning on.
-- For PREPARE TRANSACTION, which refuses whoever has notified, there is the setting.
create function rota.tell(channel text, message text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('rota.notify', true) is distinct from 'off' and pg_notification_queue_usage() < 0.9 then
        perform pg_notify(channel, message);
    end if;
end $$;
revoke all on function rota.tell(text, text) from public;
comment on function rota.tell is
    'NOTIFY where that can be done. `set local rota.notify = off` is for transactions that are to be prepared: polling finds what they bring.';

-- Whoever may insert a dead letter need not be able to call it.
alter function rota.tell_of_dead_letter() security definer set search_path = pg_catalog, pg_temp;

-- Nothing else of these changes, so their text is taken as it stands.
do $$
declare
    teller regprocedure;
begin
    for teller in
        select unnest(array[
            'rota.wake_dispatchers()', 'rota.wake_schedulers()', 'rota.tell_of_dead_letter()',
            'rota.cancel(bigint, boolean, text)', 'rota.cancel_many(text, text, timestamptz, integer, text)',
            'rota.resume_queue(text, text)', 'rota.resume_handler(text, text)']::regprocedure[])
    loop
        execute replace(pg_get_functiondef(teller), 'perform pg_notify(', 'perform rota.tell(');
    end loop;
end $$;

-- Within its bounds an index would still refuse a key of many-byte characters beside a long handler, in words that nobody can read.
-- Only what has never been claimed is judged: what went into the index by its compression must not be stopped on its way.
alter table rota.jobs add constraint "handler and unique_key must have at most 2680 bytes together"
    check (fence_token is not null or octet_length(handler) + octet_length(unique_key) <= 2680) not valid;

-- It writes days as text and reads them again: not every style that a session may have set takes both.
alter function rota.rotate_ledger(interval, integer) set datestyle = 'ISO, YMD';

-- A job_id stands for a job: also where the schedule is removed in the same moment. And a day of start_within is 24 hours.
create or replace function rota.run_schedule_now(name text, payload jsonb default null, reason text default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' as $$
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
    if not found then
        raise exception using errcode = 'RT002',
            message = format('schedule %L was removed at this very moment', left(run_schedule_now.name, 200)),
            hint = 'Nothing was enqueued.';
    end if;
    insert into rota.audit (action, target, reason) values ('run now', 'schedule ' || run_schedule_now.name, why);
    return made;
end $$;
