-- Functions for clients and operators that act on schedules. The rules at the top of 0006_job_functions.sql apply here too.

-- Return how much later than its instant a schedule's job runs. It is constant for a schedule, and evenly distributed over schedules.
create function rota.jitter_offset(schedule_id bigint, jitter interval) returns interval
    language sql immutable strict parallel safe
    return case when jitter = interval '0' then interval '0'
        else interval '1 microsecond' * (
            ('x' || left(encode(sha256(schedule_id::text::bytea), 'hex'), 15))::bit(60)::bigint
            % least(greatest(extract(epoch from jitter), 0.000001) * 1000000, 31622400000000)::bigint) end;

create function rota.find_schedule(name text) returns bigint
    language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    found_id bigint;
begin
    select schedule_id into found_id from rota.schedule_definitions where schedule_definitions.name = find_schedule.name;
    if found_id is null then
        raise exception using errcode = 'RT002',
            message = format('there is no schedule %L', left(find_schedule.name, 200)),
            hint = 'To see all names: select name from rota.schedules.';
    end if;
    return found_id;
end $$;

-- Without an argument, its column is set to the default; but a paused schedule stays paused. Runs with the caller's rights.
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
    language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    stored_id bigint;
begin
    if put_schedule.priority not between 0 and 9 then
        raise exception using errcode = 'check_violation', message = 'priority must lie between 0 (first) and 9 (last)';
    end if;
    if put_schedule.name is null or put_schedule.handler is null then
        raise exception using errcode = 'RT006', message = 'name and handler must be given',
            hint = 'Give also exactly one of cron and every.';
    end if;
    insert into rota.schedules as existing (name, handler, cron, every, timezone, payload, queue, priority, max_attempts,
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
        paused = coalesce(put_schedule.paused, existing.paused),
        resume_at = coalesce(put_schedule.resume_at, existing.resume_at)
    returning schedule_id into stored_id;
    return stored_id;
end $$;
comment on function rota.put_schedule is
    'Insert a schedule, or set all values of the schedule with that name (NULL: the default; paused and resume_at: unchanged).';

create function rota.remove_schedule(name text, reason text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(remove_schedule.reason);
begin
    delete from rota.schedule_definitions where schedule_id = rota.find_schedule(remove_schedule.name);
    insert into rota.audit (action, target, reason) values ('remove', 'schedule ' || remove_schedule.name, reason_text);
end $$;
comment on function rota.remove_schedule is 'Remove a schedule. Its history and its live jobs stay.';

-- Returns whether the call changed anything.
create function rota.pause_schedule(
    name text, cancel_live boolean default null, reason text default null, resume_at timestamptz default null
) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(pause_schedule.reason);
    target_schedule_id bigint := rota.find_schedule(pause_schedule.name);
    is_changed boolean;
    live_job_id bigint;
begin
    update rota.schedule_definitions
    set paused = true, resume_at = pause_schedule.resume_at
    where schedule_id = target_schedule_id and (not paused or resume_at is distinct from pause_schedule.resume_at);
    is_changed := found;
    if is_changed then
        insert into rota.audit (action, target, reason) values ('pause', 'schedule ' || pause_schedule.name, reason_text);
    end if;
    if pause_schedule.cancel_live then
        for live_job_id in select job_id from rota.jobs where schedule_id = target_schedule_id order by job_id loop
            perform rota.cancel(live_job_id, note => concat_ws(': ', 'its schedule was paused', reason_text));
        end loop;
    end if;
    return is_changed;
end $$;
comment on function rota.pause_schedule is
    'Keep a schedule from firing, until resume_at if given. cancel_live also cancels the jobs that it has enqueued.';

create function rota.resume_schedule(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(resume_schedule.reason);
begin
    update rota.schedule_definitions set paused = false, resume_at = null
    where schedule_id = rota.find_schedule(resume_schedule.name) and paused;
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('resume', 'schedule ' || resume_schedule.name, reason_text);
    return true;
end $$;
comment on function rota.resume_schedule is 'Let a paused schedule fire again, at its next instant strictly after now.';

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
    reason_text text := rota.bounded_note(pause_schedules.reason);
    max_schedules integer := rota.bounded_limit(pause_schedules."limit");
    changed_count bigint;
begin
    -- Lock the clocks, too: the trigger replan updates them, and one locked row would make the whole batch wait.
    with target_schedules as materialized (
        select schedule_id
        from rota.schedule_definitions
        join rota.schedule_clocks using (schedule_id)
        where not paused
          and (pause_schedules.handler is null or handler = pause_schedules.handler)
          and (pause_schedules.owner is null or owner = pause_schedules.owner)
          and (pause_schedules.name_like is null or name like pause_schedules.name_like)
        order by schedule_id
        limit max_schedules
        for update skip locked
    )
    update rota.schedule_definitions set paused = true, resume_at = pause_schedules.resume_at
    where schedule_id = any (array(select schedule_id from target_schedules));
    get diagnostics changed_count = row_count;
    if changed_count > 0 then
        insert into rota.audit (action, target, reason, affected)
        values ('pause', rota.described_schedules(pause_schedules.handler, pause_schedules.owner, pause_schedules.name_like),
            reason_text, changed_count);
    end if;
    return changed_count;
end $$;
comment on function rota.pause_schedules is
    'Pause schedules of a handler, an owner, a name (LIKE), or all, at most limit (1000). Returns how many: call again until 0.';

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
    reason_text text := rota.bounded_note(resume_schedules.reason);
    max_schedules integer := rota.bounded_limit(resume_schedules."limit");
    changed_count bigint;
begin
    with target_schedules as materialized (
        select schedule_id
        from rota.schedule_definitions
        join rota.schedule_clocks using (schedule_id)
        where paused
          and (resume_schedules.handler is null or handler = resume_schedules.handler)
          and (resume_schedules.owner is null or owner = resume_schedules.owner)
          and (resume_schedules.name_like is null or name like resume_schedules.name_like)
          and (resume_schedules.paused_since is null or paused_at >= resume_schedules.paused_since)
        order by schedule_id
        limit max_schedules
        for update skip locked
    )
    update rota.schedule_definitions set paused = false, resume_at = null
    where schedule_id = any (array(select schedule_id from target_schedules));
    get diagnostics changed_count = row_count;
    if changed_count > 0 then
        insert into rota.audit (action, target, reason, affected)
        values ('resume', rota.described_schedules(resume_schedules.handler, resume_schedules.owner, resume_schedules.name_like),
            reason_text, changed_count);
    end if;
    return changed_count;
end $$;
comment on function rota.resume_schedules is
    'Resume paused schedules, all or those paused since an instant, at most limit (1000). Returns how many: call again until 0.';

-- The job runs even if the schedule is paused or has a live job. It has its own instant, and so its own idempotency key.
-- The timezone is UTC, so that a day of start_within has 24 hours.
create function rota.run_schedule_now(name text, payload jsonb default null, reason text default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(run_schedule_now.reason);
    target_schedule_id bigint := rota.find_schedule(run_schedule_now.name);
    fire_instant timestamptz := clock_timestamp();
    new_job_id bigint := nextval(pg_get_serial_sequence('rota.jobs', 'job_id'));
begin
    loop
        -- Avoid whole seconds, which could be instants of a cron expression.
        if fire_instant = date_trunc('second', fire_instant) then
            fire_instant := fire_instant + interval '1 microsecond';
        end if;
        insert into rota.fires (scheduled_for, schedule_id, name, disposition, job_id, note)
        values (fire_instant, target_schedule_id, run_schedule_now.name, 'run_now', new_job_id,
            rota.signed_note('run now', reason_text))
        on conflict do nothing;
        exit when found;
        fire_instant := fire_instant + interval '1 microsecond';
    end loop;
    insert into rota.jobs (job_id, schedule_id, scheduled_for, run_at, start_by, created_by, handler, payload, queue, priority,
        max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta)
    overriding system value
    select new_job_id, schedule_id, fire_instant, fire_instant, fire_instant + start_within, rota.caller(), handler,
        coalesce(run_schedule_now.payload, payload), queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, meta
    from rota.schedule_definitions where schedule_id = target_schedule_id;
    if not found then
        raise exception using errcode = 'RT002',
            message = format('schedule %L was removed during this call', left(run_schedule_now.name, 200)),
            hint = 'Nothing was enqueued.';
    end if;
    insert into rota.audit (action, target, reason) values ('run now', 'schedule ' || run_schedule_now.name, reason_text);
    return new_job_id;
end $$;
comment on function rota.run_schedule_now is 'Enqueue a job of the schedule at once, even if it is not due, and return its job_id.';

-- Enqueue jobs for past instants that did not run, each at most once. The caller computes the instants with rota.cron, as
-- `rota schedule backfill` does.
-- An instant with its own row in rota.fires is left out. An instant that was skipped as part of a range has no own row. Instants that
-- are not decided yet are left to the daemons and counted as undecided.
create function rota.backfill_schedule(
    name text, instants timestamptz[], run_at timestamptz[] default null, reason text default null,
    out enqueued bigint, out left_out bigint, out undecided bigint
)
    language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(backfill_schedule.reason);
    target_schedule_id bigint := rota.find_schedule(backfill_schedule.name);
    definition rota.schedule_definitions;
    clock rota.schedule_clocks;
    decided_until timestamptz;
    given_count bigint;
begin
    if exists (
        select from unnest(backfill_schedule.instants) as requested (instant)
        where requested.instant is null or requested.instant < '1970-01-01 00:00+00' or requested.instant >= '2200-01-01 00:00+00'
    ) then
        raise exception using errcode = 'check_violation', message = 'instants must lie between the years 1970 and 2200';
    end if;
    if cardinality(backfill_schedule.instants) > 10000 then
        raise exception using errcode = 'RT006', message = 'at most 10000 instants are enqueued at once',
            hint = 'Pass them in several calls. Each call is one transaction.';
    end if;
    -- Daemons need the same lock for a decision, so an undecided instant stays undecided until the end of this transaction.
    select * into clock from rota.schedule_clocks where schedule_id = target_schedule_id for update;
    select * into definition from rota.schedule_definitions where schedule_id = target_schedule_id;
    decided_until := least(clock_timestamp(), case
        when clock.next_fire_at = '-infinity' then greatest(definition.edited_at, clock.last_fire_at)
        when clock.next_fire_at is not null then clock.next_fire_at - interval '1 microsecond'
        else clock_timestamp() end);
    select count(distinct requested.instant), count(distinct requested.instant) filter (where requested.instant > decided_until)
    into given_count, undecided
    from unnest(backfill_schedule.instants) as requested (instant);
    with requested_fires as (
        select distinct on (requested.instant) requested.instant, coalesce(requested.run_at, clock_timestamp()) as run_at
        from unnest(backfill_schedule.instants, backfill_schedule.run_at) as requested (instant, run_at)
        where requested.instant <= decided_until
        order by requested.instant, requested.run_at
    ),
    missing_fires as materialized (
        select requested_fires.instant, requested_fires.run_at, nextval('rota.jobs_job_id_seq') as job_id
        from requested_fires
        where not exists (
            select from rota.fires as fire
            where fire.scheduled_for = requested_fires.instant
              and fire.schedule_id = target_schedule_id
              and (fire.missed_from is null or fire.job_id is not null)
        )
    ),
    recorded_fires as (
        insert into rota.fires as fire (scheduled_for, schedule_id, name, disposition, job_id, note)
        select missing_fires.instant, target_schedule_id, definition.name, 'enqueued', missing_fires.job_id,
            rota.signed_note('backfilled', reason_text)
        from missing_fires
        -- The row of a skipped range belongs to its last instant. After the update it still covers the other instants of the range.
        on conflict (scheduled_for, schedule_id) do update
        set disposition = excluded.disposition, job_id = excluded.job_id, decided_at = excluded.decided_at,
            note = excluded.note || '; until then ' || fire.disposition || coalesce(' (' || fire.note || ')', '')
        returning fire.job_id
    ),
    inserted_jobs as (
        insert into rota.jobs (job_id, schedule_id, scheduled_for, run_at, start_by, created_by, handler, payload, queue,
            priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta)
        overriding system value
        select missing_fires.job_id, target_schedule_id, missing_fires.instant, missing_fires.run_at,
            missing_fires.run_at + definition.start_within, rota.caller(), definition.handler, definition.payload, definition.queue,
            definition.priority, definition.max_attempts, definition.backoff_base, definition.backoff_cap, definition.retry_for,
            definition.timeout, definition.lease, definition.delivery, definition.meta
        from missing_fires
        where missing_fires.job_id in (select recorded_fires.job_id from recorded_fires)
        order by missing_fires.instant
        returning 1
    )
    select count(*) into enqueued from inserted_jobs;
    left_out := given_count - undecided - enqueued;
    insert into rota.audit (action, target, reason, affected)
    values ('backfill', 'schedule ' || definition.name, reason_text, enqueued);
end $$;
comment on function rota.backfill_schedule is
    'Enqueue jobs for past instants of a schedule that did not run, with their true scheduled_for, each at most once. They may run '
    'at the same time, and beside the schedule''s other jobs.';

-- Also works for schedules that have been removed.
create function rota.ran(schedule text, scheduled_for timestamptz) returns boolean
    language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select exists (
        select from rota.fires
        where fires.scheduled_for = ran.scheduled_for
          and fires.name = ran.schedule
          and exists (select from rota.job_runs where job_runs.job_id = fires.job_id and job_runs.outcome = 'succeeded'))
$$;
comment on function rota.ran is 'Returns true if a job of this fire has succeeded and is still in the ledger.';

-- PostgreSQL lets every role execute a new function. roles.sql grants what each role may call.
revoke all on all functions in schema rota from public;
