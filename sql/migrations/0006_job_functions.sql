-- Functions for clients and operators that act on jobs, queues, handlers and nodes. Daemons claim, extend and settle with the
-- statements in sql/queries instead.
--
-- Arguments are passed by name, and NULL means the default. Errors have these SQLSTATEs:
--   RT001 stale token · RT002 no such schedule · RT003 no such job · RT004 wrong state · RT005 key taken · RT006 refused value
-- and 42501 (insufficient_privilege) for another login's job. No message shows a payload.
--
-- In every body, an argument is qualified with the name of its function (cancel.job_id). An unqualified name is a column or variable.

-- Operators are the roles that may call rota.cancel_many().
create function rota.is_operator() returns boolean
    language sql stable
    return has_function_privilege(rota.caller()::name, 'rota.cancel_many(text, text, timestamptz, integer, text)', 'EXECUTE');

-- A single statement with a single snapshot: between two statements a job could move to another table and be found in neither.
create function rota.state_of(job_id bigint) returns text
    language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(
        (select state from rota.jobs where jobs.job_id = state_of.job_id),
        (select 'dead' from rota.dead_letters where dead_letters.job_id = state_of.job_id),
        (select outcome from rota.job_runs where job_runs.job_id = state_of.job_id limit 1))
$$;

create function rota.refuse_foreign(job_id bigint, created_by text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if refuse_foreign.created_by is distinct from rota.caller() and not rota.is_operator() then
        raise exception using errcode = 'insufficient_privilege',
            message = format('job %s is not yours: %s inserted it', refuse_foreign.job_id, refuse_foreign.created_by),
            hint = 'Ask an operator (a member of the role rota_operator), or connect as the role that inserted it.';
    end if;
end $$;

create function rota.refuse_unknown(job_id bigint) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using errcode = 'RT003',
        message = format('there is no job %s', coalesce(refuse_unknown.job_id::text, 'NULL')),
        hint = 'The id is wrong, or the job is so old that it was deleted from the ledger.';
end $$;

create function rota.bounded_limit("limit" integer) returns integer
    language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if bounded_limit."limit" not between 1 and 10000 then
        raise exception using errcode = 'RT006',
            message = format('limit must lie between 1 and 10000, not %s', bounded_limit."limit"),
            hint = 'For more rows, call again. Each call is one transaction, which holds its locks until it ends.';
    end if;
    return coalesce(bounded_limit."limit", 1000);
end $$;

create function rota.bounded_note(note text) returns text
    language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if length(bounded_note.note) > 1000 then
        raise exception using errcode = 'RT006',
            message = 'a note or reason must have at most 1000 characters',
            hint = 'Write the cause in one line, with a link to the details.';
    end if;
    return nullif(bounded_note.note, '');
end $$;

create function rota.signed_note(verb text, note text) returns text
    language sql stable
    return verb || ' by ' || rota.caller() || coalesce(': ' || note, '');


-- ------------------------------------------------------------------------------------------------------------- enqueue

-- Replace the live job that has the unique_key by the values of a new job. Returns:
--   'rewritten'  the job had never been claimed, and now has the new values under its old job_id
--   'kept'       the job is running, and is unchanged
--   'queued'     the job is running, and the new values are inserted as a job when it ends (queue_one)
--   'gone'       the job has ended, or was waiting for a retry and is cancelled now. It is not rewritten, because its idempotency key
--                may already be known outside, and its checkpoint belongs to the old payload
-- Only for put_job(), which runs as its caller and may not write these rows.
create function rota.replace_job(
    job_id bigint, payload jsonb, queue text, run_at timestamptz, priority integer, max_attempts integer,
    backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery text,
    start_by timestamptz, idempotency_key text, meta jsonb, queue_one boolean
) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    job_owner text;
    job_handler text;
begin
    if replace_job.priority not between 0 and 9 then
        raise exception using errcode = 'check_violation', message = 'priority must lie between 0 (first) and 9 (last)';
    end if;
    select created_by, handler into job_owner, job_handler from rota.jobs
    where job_id = replace_job.job_id and unique_key is not null and schedule_id is null;
    if not found then  -- it has ended, or belongs to a schedule and must not change
        return 'gone';
    end if;
    perform rota.refuse_foreign(replace_job.job_id, job_owner);

    -- Both statements may wait for a lock. An insert with the same unique_key would wait too.
    update rota.jobs
    set payload = coalesce(replace_job.payload, '{}'),
        queue = coalesce(replace_job.queue,
            (select handlers.queue from rota.handlers where handlers.handler = jobs.handler), 'default'),
        run_at = coalesce(replace_job.run_at, now()),
        scheduled_for = coalesce(replace_job.run_at, now()),
        priority = coalesce(replace_job.priority, 5),
        max_attempts = replace_job.max_attempts,
        backoff_base = replace_job.backoff_base,
        backoff_cap = replace_job.backoff_cap,
        retry_for = replace_job.retry_for,
        timeout = replace_job.timeout,
        lease = replace_job.lease,
        delivery = replace_job.delivery,
        start_by = replace_job.start_by,
        idempotency_key = replace_job.idempotency_key,
        meta = replace_job.meta
    where job_id = replace_job.job_id and state = 'scheduled' and fence_token is null;
    if found then
        return 'rewritten';
    end if;

    with deleted_job as (
        delete from rota.jobs
        where job_id = replace_job.job_id and state = 'scheduled'
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, attempt, handler, queue, unique_key,
            idempotency_key, meta
    )
    insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, note)
    select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), attempt, 'cancelled',
        handler, queue, unique_key, idempotency_key, meta,
        rota.signed_note('cancelled', 'replaced by a new job with the same unique_key')
    from deleted_job;
    if found then
        delete from rota.cancel_requests where job_id = replace_job.job_id;
        return 'gone';
    end if;

    if replace_job.queue_one then
        -- Check the values now, by an insert that is rolled back: an error later would keep the running job from being settled.
        begin
            insert into rota.jobs (handler, payload, queue, run_at, priority, max_attempts, backoff_base, backoff_cap, retry_for,
                timeout, lease, delivery, start_by, idempotency_key, meta)
            values (job_handler, replace_job.payload, replace_job.queue, replace_job.run_at, replace_job.priority,
                replace_job.max_attempts, replace_job.backoff_base, replace_job.backoff_cap, replace_job.retry_for,
                replace_job.timeout, replace_job.lease, replace_job.delivery, replace_job.start_by,
                replace_job.idempotency_key, replace_job.meta);
            raise exception using errcode = 'RT000';
        exception when sqlstate 'RT000' then
            null;
        end;
        update rota.jobs
        set follow_up = jsonb_strip_nulls(jsonb_build_object(
            'created_by', rota.caller(), 'queue', replace_job.queue, 'run_at', replace_job.run_at,
            'priority', replace_job.priority, 'max_attempts', replace_job.max_attempts, 'backoff_base', replace_job.backoff_base,
            'backoff_cap', replace_job.backoff_cap, 'retry_for', replace_job.retry_for, 'timeout', replace_job.timeout,
            'lease', replace_job.lease, 'delivery', replace_job.delivery, 'start_by', replace_job.start_by,
            'idempotency_key', replace_job.idempotency_key
        )) || jsonb_build_object('payload', coalesce(replace_job.payload, '{}'), 'meta', replace_job.meta)
        where job_id = replace_job.job_id and state = 'running';
        return case when found then 'queued' else 'gone' end;
    end if;
    if exists (select from rota.jobs where job_id = replace_job.job_id) then
        return 'kept';
    end if;
    return 'gone';
end $$;

-- outcome:
--   created   a job was inserted, and no live job had the unique_key
--   kept      the live job with the unique_key is unchanged: on_conflict is keep, or the job is running
--   replaced  the new values replaced the live job: in its row, or as a new job if it had been claimed before
--   queued    the job is running, and on_conflict is queue_one: when it has ended, the new values are inserted as a job. job_id is
--             the running job. A later call replaces the queued values
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
    new_job_id bigint;
    live_job_id bigint;
    replacement text;
begin
    if put_job.priority not between 0 and 9 then
        raise exception using errcode = 'check_violation', message = 'priority must lie between 0 (first) and 9 (last)';
    end if;
    if put_job.handler is null then
        raise exception using errcode = 'RT006', message = 'handler must be given',
            hint = 'rota.handlers lists the names that daemons have registered.';
    end if;
    if put_job.on_conflict not in ('keep', 'replace', 'queue_one', 'error') then
        raise exception using errcode = 'RT006',
            message = format('on_conflict must be keep, replace, queue_one or error, not %L', left(put_job.on_conflict, 40)),
            hint = 'keep (the default) does not change the live job with this unique_key, replace rewrites it unless it is running, '
                   'queue_one also lets the new values run after a running job, error raises RT005.';
    end if;

    -- The insert waits for a transaction that has inserted or deleted the same key. If the live job ends before the select below, the
    -- key is free, and the insert is tried again.
    for try_number in 1..20 loop
        insert into rota.jobs (handler, payload, queue, run_at, priority, unique_key, max_attempts, backoff_base, backoff_cap,
            retry_for, timeout, lease, delivery, start_by, idempotency_key, meta)
        values (put_job.handler, put_job.payload, put_job.queue, put_job.run_at, put_job.priority, put_job.unique_key,
            put_job.max_attempts, put_job.backoff_base, put_job.backoff_cap, put_job.retry_for, put_job.timeout,
            put_job.lease, put_job.delivery, put_job.start_by, put_job.idempotency_key, put_job.meta)
        on conflict (handler, unique_key) where unique_key is not null do nothing
        returning job_id into new_job_id;
        if new_job_id is not null then
            return query select new_job_id, true, case when replacement = 'gone' then 'replaced' else 'created' end;
            return;
        end if;

        select job_id into live_job_id from rota.jobs where handler = put_job.handler and unique_key = put_job.unique_key;
        continue when live_job_id is null;

        if put_job.on_conflict = 'error' then
            raise exception using errcode = 'RT005',
                message = format('live job %s of handler %s already has this unique_key', live_job_id, put_job.handler),
                hint = 'Wait until that job has ended, cancel it, or pass on_conflict => ''keep'' or ''replace''.';
        elsif put_job.on_conflict in ('replace', 'queue_one') then
            replacement := rota.replace_job(live_job_id, put_job.payload, put_job.queue, put_job.run_at, put_job.priority,
                put_job.max_attempts, put_job.backoff_base, put_job.backoff_cap, put_job.retry_for, put_job.timeout,
                put_job.lease, put_job.delivery, put_job.start_by, put_job.idempotency_key, put_job.meta,
                put_job.on_conflict = 'queue_one');
            continue when replacement = 'gone';
        end if;
        return query select live_job_id, false,
            case replacement when 'rewritten' then 'replaced' when 'queued' then 'queued' else 'kept' end;
        return;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('other sessions took and released the unique_key of this job of handler %s too often', put_job.handler),
        hint = 'Nothing was inserted. Try again.';
end $$;
comment on function rota.put_job is
    'rota.enqueue with an outcome: created, replaced, queued (behind a running job) or kept (with replace: the job is running).';

create function rota.enqueue(
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
comment on function rota.enqueue is
    'Insert a job with the rights of the caller. If a live job of the handler has the unique_key, keep returns that job, replace '
    'rewrites it unless it is running, queue_one also runs the new values after a running job, and error raises RT005.';


-- -------------------------------------------------------------------------------------------------------- running jobs

create function rota.guard(resource text, token bigint) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    newest_token bigint;
begin
    if rota.is_name(guard.resource) is not true then
        raise exception using errcode = 'RT006', message = 'resource must be a name of 1 to 200 characters on one line',
            hint = 'Name the resource that the effect changes, for example order:7.';
    end if;
    select case when is_called then last_value else 0 end into newest_token from rota.fence_tokens;
    if guard.token is null or guard.token not between 1 and newest_token then
        raise exception using errcode = 'RT006',
            message = format('token %s was never issued here', coalesce(guard.token::text, 'NULL')),
            hint = 'Pass the fence token of the running attempt.';
    end if;
    -- An equal token also updates the row, because the row's lock makes a later claim wait for the end of this transaction.
    insert into rota.guards as existing (resource, token, seen_at)
    values (guard.resource, guard.token, clock_timestamp())
    on conflict (resource) do update set token = excluded.token, seen_at = excluded.seen_at
    where existing.token <= excluded.token;
    if not found then
        raise exception using errcode = 'RT001',
            message = format('token %s is stale for %s: a later claim has used this resource', guard.token, guard.resource),
            hint = 'Roll back and stop: this attempt has lost its lease.';
    end if;
end $$;
comment on function rota.guard is
    'In the caller''s transaction: store the highest fence token seen for the resource, and refuse a lower one (RT001).';

create function rota.complete(job_id bigint, fence_token bigint, result jsonb default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if octet_length(complete.result::text) > 8192 then
        raise exception using errcode = 'RT006', message = 'result must be at most 8 KiB as text',
            hint = 'Store large results in your own table and return their key.';
    end if;
    with deleted_job as (
        delete from rota.jobs
        where job_id = complete.job_id and fence_token = complete.fence_token and leased_by is not null
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, leased_by, attempt, handler, queue, unique_key,
            idempotency_key, meta
    )
    insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
        outcome, handler, queue, unique_key, idempotency_key, meta, result)
    select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), leased_by, attempt,
        'succeeded', handler, queue, unique_key, idempotency_key, meta, complete.result
    from deleted_job;
    if not found then
        -- This also refuses a job that the same token has completed: a repeated transaction must not commit twice.
        raise exception using errcode = 'RT001',
            message = format('token %s is stale for job %s: the job has been settled, or belongs to a later claim',
                coalesce(complete.fence_token::text, 'NULL'), coalesce(complete.job_id::text, 'NULL')),
            hint = 'Roll back and stop: this transaction must not commit.';
    end if;
    delete from rota.cancel_requests where job_id = complete.job_id;
end $$;
comment on function rota.complete is
    'In the caller''s transaction: settle the running job as succeeded, so that its effect and its completion commit together.';


-- --------------------------------------------------------------------------------------------- cancel, reschedule, retry

-- Returns 'cancelled' (the job is in the ledger), 'requested' (it is running or locked, and its daemon is notified), or 'finished' (it
-- had ended before, or is a dead letter). Does not wait for locks on jobs.
create function rota.cancel(job_id bigint, force boolean default null, note text default null) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(cancel.note);
    is_forced boolean := coalesce(cancel.force, false);
    job_state text;
    job_owner text;
begin
    loop
        select rota.state_of(cancel.job_id), (select created_by from rota.jobs where job_id = cancel.job_id)
        into job_state, job_owner;
        if job_state is null then
            perform rota.refuse_unknown(cancel.job_id);
        elsif job_state not in ('scheduled', 'running') then
            return 'finished';
        end if;
        perform rota.refuse_foreign(cancel.job_id, job_owner);

        with target_job as materialized (
            select job_id from rota.jobs
            where job_id = cancel.job_id and (state = 'scheduled' or is_forced)
            for update skip locked
        ), deleted_job as (
            delete from rota.jobs
            where job_id = any (array(select job_id from target_job))
            returning job_id, schedule_id, scheduled_for, fence_token, started_at, leased_by, attempt, handler, queue,
                unique_key, idempotency_key, meta
        )
        insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
            outcome, handler, queue, unique_key, idempotency_key, meta, note)
        select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), leased_by, attempt,
            'cancelled', handler, queue, unique_key, idempotency_key, meta, rota.signed_note('cancelled', reason_text)
        from deleted_job;
        if found then
            delete from rota.cancel_requests where job_id = cancel.job_id;
            if job_state = 'running' then
                perform rota.tell('rota_cancel', cancel.job_id::text);
            end if;
            if rota.is_operator() then
                insert into rota.audit (action, target, reason)
                values (case when is_forced then 'force cancel' else 'cancel' end, 'job ' || cancel.job_id, reason_text);
            end if;
            return 'cancelled';
        end if;

        insert into rota.cancel_requests (job_id, requested_by, reason)
        values (cancel.job_id, rota.caller(), reason_text)
        on conflict do nothing;
        if exists (select from rota.jobs where job_id = cancel.job_id) then
            perform rota.tell('rota_cancel', cancel.job_id::text);
            if rota.is_operator() then
                insert into rota.audit (action, target, reason) values ('request cancel', 'job ' || cancel.job_id, reason_text);
            end if;
            return 'requested';
        end if;
        -- The job ended meanwhile. Its settlement could not see this request.
        delete from rota.cancel_requests where job_id = cancel.job_id;
    end loop;
end $$;
comment on function rota.cancel is
    'Cancel one''s own job (operators: any job). force ends a running job at once and makes its token stale.';

-- Cancels waiting jobs, oldest first, and asks running jobs to stop. Skips locked rows. Call again until both numbers are 0.
create function rota.cancel_many(
    handler text default null,
    queue text default null,
    before timestamptz default null,
    "limit" integer default null,
    note text default null
) returns table (cancelled bigint, requested bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(cancel_many.note);
    max_jobs integer := rota.bounded_limit(cancel_many."limit");
    cancelled_count bigint;
    requested_count bigint := 0;
begin
    if coalesce(cancel_many.handler, cancel_many.queue, cancel_many.before::text) is null then
        raise exception using errcode = 'RT006', message = 'a handler, queue or before must be given',
            hint = 'before => ''infinity'' cancels every live job. To stop everything without cancelling, call rota.pause_queue(''*'').';
    end if;
    with waiting_jobs as materialized (
        select job_id from rota.jobs
        where state = 'scheduled'
          and (cancel_many.handler is null or handler = cancel_many.handler)
          and (cancel_many.queue is null or queue = cancel_many.queue)
          and (cancel_many.before is null or run_at < cancel_many.before)
        order by job_id
        limit max_jobs
        for update skip locked
    ), deleted_jobs as (
        delete from rota.jobs
        where job_id = any (array(select job_id from waiting_jobs))
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, attempt, handler, queue, unique_key,
            idempotency_key, meta
    ), deleted_requests as (
        delete from rota.cancel_requests where job_id = any (array(select job_id from waiting_jobs))
    )
    insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, note)
    select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), attempt, 'cancelled',
        handler, queue, unique_key, idempotency_key, meta, rota.signed_note('cancelled', reason_text)
    from deleted_jobs;
    get diagnostics cancelled_count = row_count;

    if cancelled_count < max_jobs then
        insert into rota.cancel_requests (job_id, requested_by, reason)
        select job_id, rota.caller(), reason_text from rota.jobs
        where state = 'running'
          and (cancel_many.handler is null or handler = cancel_many.handler)
          and (cancel_many.queue is null or queue = cancel_many.queue)
          and (cancel_many.before is null or run_at < cancel_many.before)
          and not exists (select from rota.cancel_requests where cancel_requests.job_id = jobs.job_id)
        order by job_id
        limit max_jobs - cancelled_count
        on conflict do nothing;
        get diagnostics requested_count = row_count;
    end if;
    if requested_count > 0 then
        perform rota.tell('rota_cancel', '');
    end if;
    insert into rota.audit (action, target, reason, affected)
    values ('cancel many', concat_ws(', ', 'handler ' || cancel_many.handler, 'queue ' || cancel_many.queue,
        'due before ' || cancel_many.before), reason_text, cancelled_count + requested_count);
    return query select cancelled_count, requested_count;
end $$;
comment on function rota.cancel_many is
    'Cancel live jobs by handler, queue or run_at before an instant, at most limit (1000) of them.';

-- Returns the instant as stored. scheduled_for, and with it the idempotency key, does not change.
create function rota.reschedule(job_id bigint, run_at timestamptz default null, note text default null) returns timestamptz
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(reschedule.note);
    job_state text;
    job_owner text;
    new_run_at timestamptz;
begin
    loop
        select rota.state_of(reschedule.job_id), (select created_by from rota.jobs where job_id = reschedule.job_id)
        into job_state, job_owner;
        if job_state is null then
            perform rota.refuse_unknown(reschedule.job_id);
        elsif job_state = 'running' then
            raise exception using errcode = 'RT004', message = format('job %s is running', reschedule.job_id),
                hint = 'Only a waiting job can be rescheduled. Cancel the job, or wait until its attempt has ended.';
        elsif job_state <> 'scheduled' then
            raise exception using errcode = 'RT004', message = format('job %s has ended: %s', reschedule.job_id, job_state),
                hint = case job_state when 'dead' then 'Redrive it with rota.redrive() first.' else 'Enqueue a new job.' end;
        end if;
        perform rota.refuse_foreign(reschedule.job_id, job_owner);
        update rota.jobs set run_at = coalesce(reschedule.run_at, now())
        where job_id = reschedule.job_id and state = 'scheduled'
        returning run_at into new_run_at;
        if found then
            if rota.is_operator() then
                insert into rota.audit (action, target, reason) values ('reschedule', 'job ' || reschedule.job_id, reason_text);
            end if;
            return new_run_at;
        end if;
    end loop;
end $$;
comment on function rota.reschedule is 'Make a waiting job due at another instant (NULL: now).';

-- Skips locked rows.
create function rota.retry_now(
    handler text default null,
    queue text default null,
    "limit" integer default null,
    note text default null
) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(retry_now.note);
    max_jobs integer := rota.bounded_limit(retry_now."limit");
    changed_count bigint;
begin
    with retrying_jobs as materialized (
        select job_id from rota.jobs
        where state = 'scheduled' and attempt > 0 and run_at > now()
          and (retry_now.handler is null or handler = retry_now.handler)
          and (retry_now.queue is null or queue = retry_now.queue)
        order by job_id
        limit max_jobs
        for update skip locked
    )
    update rota.jobs set run_at = now()
    where job_id = any (array(select job_id from retrying_jobs));
    get diagnostics changed_count = row_count;
    insert into rota.audit (action, target, reason, affected)
    values ('retry now', coalesce(nullif(concat_ws(', ', 'handler ' || retry_now.handler, 'queue ' || retry_now.queue), ''),
        'all retrying jobs'), reason_text, changed_count);
    return changed_count;
end $$;
comment on function rota.retry_now is
    'Make jobs that wait for their retry due at once, at most limit (1000). Returns how many: call again until 0.';


-- -------------------------------------------------------------------------------------------------------- dead letters

-- Make dead letters live jobs again, and return the ids of those that were redriven. A letter is not redriven if a live job has its
-- unique_key or its exclusive schedule. For redrive() and redrive_many().
create function rota.send_back(job_ids bigint[], payload jsonb, spread interval) returns bigint[]
    language sql set search_path = pg_catalog, pg_temp as $$
    -- Lock the clocks of exclusive jobs' schedules: daemons skip a schedule whose clock is locked. Without this, their insert of the
    -- schedule's next job would wait for this transaction at jobs_exclusive_idx, and the fires of all other schedules with it.
    select from rota.schedule_clocks
    where schedule_id = any (array(
        select schedule_id from rota.dead_letters where job_id = any (send_back.job_ids) and exclusive))
    order by schedule_id
    for update;

    with letters as materialized (
        select job_id, scheduled_for, created_at, fence_token, schedule_id, max_attempts, priority, exclusive,
            handler, queue, created_by, coalesce(send_back.payload, dead_letters.payload) as payload, delivery, backoff_base,
            backoff_cap, timeout, lease, unique_key, idempotency_key, meta, checkpoint
        from rota.dead_letters
        where job_id = any (send_back.job_ids)
        order by job_id
        for update
    ), sent_jobs as (
        -- fence_token is copied, because it shows that the job has been claimed before.
        insert into rota.jobs (job_id, run_at, scheduled_for, created_at, fence_token, schedule_id, max_attempts,
            priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, timeout, lease,
            unique_key, idempotency_key, meta, checkpoint)
        overriding system value
        select job_id,
            now() + coalesce(send_back.spread, interval '0')
                    * ((row_number() over (order by job_id) - 1)::double precision / count(*) over ()),
            scheduled_for, created_at, fence_token, schedule_id, max_attempts,
            priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, timeout, lease,
            unique_key, idempotency_key, meta, checkpoint
        from letters
        order by job_id
        on conflict do nothing
        returning job_id
    ), deleted_letters as (
        delete from rota.dead_letters where job_id = any (array(select job_id from sent_jobs))
    ), deleted_requests as (
        delete from rota.cancel_requests where job_id = any (array(select job_id from sent_jobs))
    )
    select coalesce(array_agg(job_id), '{}') from sent_jobs
$$;

create function rota.refuse_not_dead(job_id bigint) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    job_state text := rota.state_of(refuse_not_dead.job_id);
begin
    if job_state is null then
        perform rota.refuse_unknown(refuse_not_dead.job_id);
    end if;
    raise exception using errcode = 'RT004',
        message = format('job %s is not a dead letter: %s', refuse_not_dead.job_id, job_state),
        hint = case when job_state in ('scheduled', 'running') then 'It is live. Use rota.cancel() or rota.reschedule().'
                    else 'It has ended. Enqueue a new job.' end;
end $$;

create function rota.redrive(job_id bigint, payload jsonb default null, note text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(redrive.note);
    blocking_job_id bigint;
begin
    for try_number in 1..20 loop
        perform from rota.dead_letters where job_id = redrive.job_id;
        if not found then
            perform rota.refuse_not_dead(redrive.job_id);
        end if;
        if rota.send_back(array[redrive.job_id], redrive.payload, null) <> '{}' then
            insert into rota.audit (action, target, reason)
            values (case when redrive.payload is null then 'redrive' else 'redrive with another payload' end,
                'job ' || redrive.job_id, reason_text);
            return;
        end if;
        select coalesce(
            (select jobs.job_id from rota.jobs where jobs.handler = letter.handler and jobs.unique_key = letter.unique_key),
            (select jobs.job_id from rota.jobs where jobs.exclusive and jobs.schedule_id = letter.schedule_id))
        into blocking_job_id
        from rota.dead_letters as letter where letter.job_id = redrive.job_id;
        -- If no job is found, the blocking job has ended meanwhile.
        if blocking_job_id is not null then
            raise exception using errcode = 'RT005',
                message = format('job %s stays a dead letter: live job %s has its unique_key or its schedule',
                    redrive.job_id, blocking_job_id),
                hint = format('Redrive it after job %s has ended, or discard it.', blocking_job_id);
        end if;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('other sessions took and released the unique_key of job %s too often', redrive.job_id),
        hint = 'The job is still a dead letter. Try again.';
end $$;
comment on function rota.redrive is
    'Make a dead letter a live job again, with its job_id, idempotency key, checkpoint and history. Its attempts start at 0.';

-- Redrives the oldest jobs first. A letter is left out if a live job has its unique_key or exclusive schedule, or if a constraint
-- refuses it; the next one takes its place. Call again until redriven is 0.
create function rota.redrive_many(
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
    reason_text text := rota.bounded_note(redrive_many.note);
    max_jobs integer := rota.bounded_limit(redrive_many."limit");
    last_job_id bigint := 0;
    redriven_count bigint := 0;
    left_out_count bigint := 0;
    batch bigint[];
    one_job_id bigint;
    redriven_in_batch integer;
begin
    if rota.is_duration(redrive_many.spread) is false then
        raise exception using errcode = 'RT006', message = 'spread must be positive, at most 366 days, without months',
            hint = 'NULL makes all of them due at once.';
    end if;
    loop
        batch := array(
            select job_id from rota.dead_letters
            where job_id > last_job_id
              and (redrive_many.handler is null or handler = redrive_many.handler)
              and (redrive_many.queue is null or queue = redrive_many.queue)
              and (redrive_many.reason is null or reason = redrive_many.reason)
              and (redrive_many.error_kind is null or error_kind = redrive_many.error_kind)
              and (redrive_many.before is null or finished_at < redrive_many.before)
              and (redrive_many.include_at_most_once or delivery is distinct from 'at_most_once')
            order by job_id
            limit max_jobs - redriven_count
            for update skip locked);
        exit when batch = '{}';
        begin
            redriven_in_batch := cardinality(rota.send_back(batch, null, redrive_many.spread));
        exception when data_exception or integrity_constraint_violation then
            -- At least one letter cannot be inserted, so redrive them one by one.
            redriven_in_batch := 0;
            foreach one_job_id in array batch loop
                begin
                    if rota.send_back(array[one_job_id], null, null) <> '{}' then
                        update rota.jobs
                        set run_at = now() + redrive_many.spread * (redriven_in_batch::double precision / cardinality(batch))
                        where job_id = one_job_id and redrive_many.spread is not null;
                        redriven_in_batch := redriven_in_batch + 1;
                    end if;
                exception when data_exception or integrity_constraint_violation then
                    raise notice 'job % stays a dead letter: %', one_job_id, sqlerrm;
                end;
            end loop;
        end;
        redriven_count := redriven_count + redriven_in_batch;
        left_out_count := left_out_count + cardinality(batch) - redriven_in_batch;
        last_job_id := batch[cardinality(batch)];
        exit when redriven_count = max_jobs;
    end loop;
    insert into rota.audit (action, target, reason, affected)
    values ('redrive many', coalesce(nullif(concat_ws(', ', 'handler ' || redrive_many.handler, 'queue ' || redrive_many.queue,
        'reason ' || redrive_many.reason, 'error kind ' || redrive_many.error_kind, 'dead before ' || redrive_many.before), ''),
        'all dead letters'), reason_text, redriven_count);
    return query select redriven_count, left_out_count;
end $$;
comment on function rota.redrive_many is
    'Redrive at most limit (1000) dead letters, distributed evenly over spread. Skips at_most_once jobs without include_at_most_once.';

create function rota.discard_letters(job_ids bigint[], note text) returns bigint
    language sql set search_path = pg_catalog, pg_temp as $$
    with deleted_letters as (
        delete from rota.dead_letters
        where job_id = any (discard_letters.job_ids)
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, node, attempt, handler, queue, unique_key,
            idempotency_key, meta
    ), ledger_rows as (
        insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
            outcome, handler, queue, unique_key, idempotency_key, meta, note)
        select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), node, attempt,
            'discarded', handler, queue, unique_key, idempotency_key, meta, rota.signed_note('discarded', discard_letters.note)
        from deleted_letters
        returning job_id
    )
    select count(*) from ledger_rows
$$;

create function rota.discard(job_id bigint, note text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(discard.note);
begin
    if rota.discard_letters(array[discard.job_id], reason_text) = 0 then
        perform rota.refuse_not_dead(discard.job_id);
    end if;
    insert into rota.audit (action, target, reason) values ('discard', 'job ' || discard.job_id, reason_text);
end $$;
comment on function rota.discard is 'Move a dead letter to the ledger as discarded, with who did it and why.';

-- Skips locked rows.
create function rota.discard_many(
    handler text default null,
    queue text default null,
    reason text default null,
    error_kind text default null,
    before timestamptz default null,
    "limit" integer default null,
    note text default null
) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(discard_many.note);
    max_letters integer := rota.bounded_limit(discard_many."limit");
    batch bigint[];
    discarded_count bigint;
begin
    if coalesce(discard_many.handler, discard_many.queue, discard_many.reason, discard_many.error_kind,
                discard_many.before::text) is null then
        raise exception using errcode = 'RT006', message = 'a handler, queue, reason, error_kind or before must be given',
            hint = 'To discard all dead letters, pass before => now().';
    end if;
    batch := array(
        select job_id from rota.dead_letters
        where (discard_many.handler is null or handler = discard_many.handler)
          and (discard_many.queue is null or queue = discard_many.queue)
          and (discard_many.reason is null or reason = discard_many.reason)
          and (discard_many.error_kind is null or error_kind = discard_many.error_kind)
          and (discard_many.before is null or finished_at < discard_many.before)
        order by job_id
        limit max_letters
        for update skip locked);
    discarded_count := rota.discard_letters(batch, reason_text);
    insert into rota.audit (action, target, reason, affected)
    values ('discard many', concat_ws(', ', 'handler ' || discard_many.handler, 'queue ' || discard_many.queue,
        'reason ' || discard_many.reason, 'error kind ' || discard_many.error_kind, 'dead before ' || discard_many.before),
        reason_text, discarded_count);
    return discarded_count;
end $$;
comment on function rota.discard_many is
    'Move dead letters to the ledger as discarded, at most limit (1000). Returns how many: call again until 0. Needs at least one filter.';


-- -------------------------------------------------------------------------------------------------- pause and resume, nodes

create function rota.refuse_bad_name(name text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if rota.is_name(refuse_bad_name.name) is not true then
        raise exception using errcode = 'RT006', message = 'name must be a name of 1 to 200 characters on one line',
            hint = 'rota.handlers lists the handlers that daemons have registered, and their queues.';
    end if;
end $$;

-- These four functions return whether the call changed anything. A pause keeps jobs from being claimed; running jobs continue.
create function rota.pause_queue(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(pause_queue.reason);
begin
    perform rota.refuse_bad_name(pause_queue.name);
    if pause_queue.name not in ('*', 'default')
       and not exists (select from rota.nodes where pause_queue.name = any (queues))
       and not exists (select from rota.handlers where queue = pause_queue.name)
       and not exists (select from rota.jobs where queue = pause_queue.name and state = 'scheduled') then
        raise notice 'the queue % is paused, but no daemon, handler or waiting job uses it', pause_queue.name;
    end if;
    insert into rota.queues as existing (queue, paused, pause_reason, paused_by, paused_at)
    values (pause_queue.name, true, reason_text, rota.caller(), clock_timestamp())
    on conflict (queue) do update
    set paused = true, pause_reason = excluded.pause_reason, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where not existing.paused or existing.pause_reason is distinct from coalesce(excluded.pause_reason, existing.pause_reason);
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('pause', 'queue ' || pause_queue.name, reason_text);
    return true;
end $$;
comment on function rota.pause_queue is 'Keep the jobs of a queue (*: of all queues) from being claimed.';

create function rota.pause_handler(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(pause_handler.reason);
begin
    perform rota.refuse_bad_name(pause_handler.name);
    if not exists (select from rota.handlers where handler = pause_handler.name and seen_at is not null) then
        raise notice 'the handler % is paused, but no daemon has ever registered it', pause_handler.name;
    end if;
    insert into rota.handlers as existing (handler, paused, pause_reason, paused_by, paused_at)
    values (pause_handler.name, true, reason_text, rota.caller(), clock_timestamp())
    on conflict (handler) do update
    set paused = true, pause_reason = excluded.pause_reason, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where not existing.paused or existing.pause_reason is distinct from coalesce(excluded.pause_reason, existing.pause_reason);
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('pause', 'handler ' || pause_handler.name, reason_text);
    return true;
end $$;
comment on function rota.pause_handler is 'Keep the jobs of a handler from being claimed.';

create function rota.resume_queue(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(resume_queue.reason);
begin
    update rota.queues set paused = false, pause_reason = null, paused_by = null, paused_at = null
    where queue = resume_queue.name and paused;
    if not found then
        return false;
    end if;
    perform rota.tell('rota_wake', '');
    insert into rota.audit (action, target, reason) values ('resume', 'queue ' || resume_queue.name, reason_text);
    return true;
end $$;
comment on function rota.resume_queue is 'Let the jobs of a paused queue be claimed again.';

create function rota.resume_handler(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(resume_handler.reason);
begin
    update rota.handlers set paused = false, pause_reason = null, paused_by = null, paused_at = null
    where handler = resume_handler.name and paused;
    if not found then
        return false;
    end if;
    perform rota.tell('rota_wake', '');
    insert into rota.audit (action, target, reason) values ('resume', 'handler ' || resume_handler.name, reason_text);
    return true;
end $$;
comment on function rota.resume_handler is 'Let the jobs of a paused handler be claimed again.';

create function rota.forget_node(node_id uuid, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(forget_node.reason);
    host_and_pid text;
begin
    if exists (select from rota.nodes where node_id = forget_node.node_id and seen_at > now() - interval '15 seconds') then
        raise exception using errcode = 'RT004', message = format('node %s is alive', forget_node.node_id),
            hint = 'Stop the daemon with SIGTERM. It then removes itself from the list.';
    end if;
    with deleted_nodes as (
        delete from rota.nodes where node_id = forget_node.node_id returning host, pid
    ),
    deleted_lost_nodes as (
        delete from rota.lost_nodes where node_id = forget_node.node_id returning host, pid
    )
    select format('%s:%s', host, pid) into host_and_pid
    from (select * from deleted_nodes union all select * from deleted_lost_nodes) as deleted
    limit 1;
    if host_and_pid is null then
        return false;
    end if;
    insert into rota.audit (action, target, reason)
    values ('forget', 'node ' || forget_node.node_id || ' (' || host_and_pid || ')', reason_text);
    return true;
end $$;
comment on function rota.forget_node is 'Delete a vanished daemon from the list of lost nodes. Returns false if it is not listed.';
