-- What clients and operators call. Claim, extend and settle are no functions: those are the daemons' own statements.
--
-- Named arguments; NULL means the default. Refusals have SQLSTATEs of their own:
--   RT001 stale token · RT002 no such schedule · RT003 no such job · RT004 wrong state · RT005 key taken · RT006 refused value
-- and 42501 (insufficient_privilege) for somebody else's job. No message shows a payload.
--
-- In every body an argument is written with its function's name (cancel.job_id) and a bare name is a column.

-- Operators are those who may call rota.cancel_many().
create function rota.is_operator() returns boolean
    language sql stable
    return has_function_privilege(rota.caller()::name, 'rota.cancel_many(text, text, timestamptz, integer, text)', 'EXECUTE');

-- Where a job stands, in one snapshot: read table by table, a job on its way from one to the next would be in none.
create function rota.state_of(job_id bigint) returns text
    language sql stable as $$
    select coalesce(
        (select state from rota.jobs where jobs.job_id = state_of.job_id),
        (select 'dead' from rota.dead_letters where dead_letters.job_id = state_of.job_id),
        (select outcome from rota.job_runs where job_runs.job_id = state_of.job_id limit 1))
$$;

create function rota.refuse_foreign(job_id bigint, created_by text) returns void
    language plpgsql as $$
begin
    if refuse_foreign.created_by is distinct from rota.caller() and not rota.is_operator() then
        raise exception using errcode = 'insufficient_privilege',
            message = format('job %s is not yours: %s inserted it', refuse_foreign.job_id, refuse_foreign.created_by),
            hint = 'Ask an operator (a member of the role rota_operator), or connect as the role that inserted it.';
    end if;
end $$;

create function rota.refuse_unknown(job_id bigint) returns void
    language plpgsql as $$
begin
    raise exception using errcode = 'RT003',
        message = format('there is no job %s', coalesce(refuse_unknown.job_id::text, 'NULL')),
        hint = 'It is neither live nor dead, nor in the ledger: the number is wrong, or the job ended longer ago than the '
               'ledger is kept.';
end $$;

create function rota.bounded_limit("limit" integer) returns integer
    language plpgsql immutable as $$
begin
    if bounded_limit."limit" not between 1 and 10000 then
        raise exception using errcode = 'RT006',
            message = format('limit must lie between 1 and 10000, not %s', bounded_limit."limit"),
            hint = 'One call is one transaction and keeps its locks to the end: for more rows call again.';
    end if;
    return coalesce(bounded_limit."limit", 1000);
end $$;

create function rota.bounded_note(note text) returns text
    language plpgsql immutable as $$
begin
    if length(bounded_note.note) > 1000 then
        raise exception using errcode = 'RT006',
            message = 'a note or reason must have at most 1000 characters',
            hint = 'Say the cause in a line, and where more can be read.';
    end if;
    return nullif(bounded_note.note, '');
end $$;

create function rota.signed_note(verb text, note text) returns text
    language sql stable
    return verb || ' by ' || rota.caller() || coalesce(': ' || note, '');


-- ------------------------------------------------------------------------------------------------------------- enqueue

-- Give the live job that holds the key the columns of the one that can't be inserted beside it:
--   'rewritten'  it had never been claimed; it is now as if inserted at this moment, under its old job_id
--   'kept'       it is running, and stays as it is
--   'gone'       it has ended; or it had been claimed before and waited (for a retry, a release), and is now cancelled: an
--                idempotency key that the world may know and a checkpoint must not go with another payload
-- For enqueue() alone, which runs as its caller and may not write these rows.
create function rota.replace_job(
    job_id bigint, payload jsonb, queue text, run_at timestamptz, priority integer, max_attempts integer,
    backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery text,
    start_by timestamptz, idempotency_key text, meta jsonb
) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    owner text;
begin
    select created_by into owner from rota.jobs
    where job_id = replace_job.job_id and unique_key is not null and schedule_id is null;
    if not found then  -- also for what enqueue() never asks for: the identity of a fire is nobody's to rewrite
        return 'gone';
    end if;
    perform rota.refuse_foreign(replace_job.job_id, owner);

    -- Both statements may wait for a lock: this is the caller's own transaction, and a unique index would make it wait too.
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

    with gone as (
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
    from gone;
    if found then
        delete from rota.cancel_requests where job_id = replace_job.job_id;
        return 'gone';
    end if;

    if exists (select from rota.jobs where job_id = replace_job.job_id) then
        return 'kept';
    end if;
    return 'gone';
end $$;

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
    language plpgsql as $$
#variable_conflict use_column
declare
    fresh bigint;
    taken bigint;
    became text;
begin
    if enqueue.handler is null then
        raise exception using errcode = 'RT006', message = 'handler must be given',
            hint = 'rota.handlers lists the names that daemons have registered.';
    end if;
    if enqueue.on_conflict not in ('keep', 'replace', 'error') then
        raise exception using errcode = 'RT006',
            message = format('on_conflict must be keep, replace or error, not %L', left(enqueue.on_conflict, 40)),
            hint = 'keep (the default) leaves the live job with this unique_key alone, replace rewrites it unless it runs, '
                   'error raises RT005.';
    end if;

    -- The insert waits for whoever holds the key in an open transaction. By the time the lookup looks, that job may
    -- have ended: then the key is free and the insert is tried again.
    for turn in 1..20 loop
        insert into rota.jobs (handler, payload, queue, run_at, priority, unique_key, max_attempts, backoff_base, backoff_cap,
            retry_for, timeout, lease, delivery, start_by, idempotency_key, meta)
        values (enqueue.handler, enqueue.payload, enqueue.queue, enqueue.run_at, enqueue.priority, enqueue.unique_key,
            enqueue.max_attempts, enqueue.backoff_base, enqueue.backoff_cap, enqueue.retry_for, enqueue.timeout,
            enqueue.lease, enqueue.delivery, enqueue.start_by, enqueue.idempotency_key, enqueue.meta)
        on conflict (handler, unique_key) where unique_key is not null do nothing
        returning job_id into fresh;
        if fresh is not null then
            return query select fresh, true;
            return;
        end if;

        select job_id into taken from rota.jobs where handler = enqueue.handler and unique_key = enqueue.unique_key;
        continue when taken is null;

        if enqueue.on_conflict = 'error' then
            raise exception using errcode = 'RT005',
                message = format('live job %s of handler %s already has this unique_key', taken, enqueue.handler),
                hint = 'Wait until that job has ended, cancel it, or say on_conflict => ''keep'' or ''replace''.';
        elsif enqueue.on_conflict = 'replace' then
            became := rota.replace_job(taken, enqueue.payload, enqueue.queue, enqueue.run_at, enqueue.priority,
                enqueue.max_attempts, enqueue.backoff_base, enqueue.backoff_cap, enqueue.retry_for, enqueue.timeout,
                enqueue.lease, enqueue.delivery, enqueue.start_by, enqueue.idempotency_key, enqueue.meta);
            continue when became = 'gone';
        end if;
        return query select taken, false;
        return;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('the unique_key of this job of handler %s changed hands too often to be taken or found',
            enqueue.handler),
        hint = 'Nothing was inserted: try again.';
end $$;
comment on function rota.enqueue is
    'Insert a job as its caller. With a unique_key that a live job of the handler has: keep returns that job, replace '
    'rewrites it unless it runs, error raises RT005.';


-- -------------------------------------------------------------------------------------------------------- running jobs

create function rota.guard(resource text, token bigint) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    newest bigint;
begin
    if rota.is_name(guard.resource) is not true then
        raise exception using errcode = 'RT006', message = 'resource must be a name of 1 to 200 characters on one line',
            hint = 'Name what the effect touches, for example order:7.';
    end if;
    select case when is_called then last_value else 0 end into newest from rota.fence_tokens;
    if guard.token is null or guard.token not between 1 and newest then
        raise exception using errcode = 'RT006',
            message = format('token %s was never issued here', coalesce(guard.token::text, 'NULL')),
            hint = 'Pass the fence token of the running attempt.';
    end if;
    -- An equal token writes too: the row's lock keeps a later holder waiting until this transaction has ended.
    insert into rota.guards as known (resource, token, seen_at)
    values (guard.resource, guard.token, clock_timestamp())
    on conflict (resource) do update set token = excluded.token, seen_at = excluded.seen_at
    where known.token <= excluded.token;
    if not found then
        raise exception using errcode = 'RT001',
            message = format('token %s is stale for %s: a later claim has been here', guard.token, guard.resource),
            hint = 'Roll back and stop: this attempt has lost its lease.';
    end if;
end $$;
comment on function rota.guard is
    'In the caller''s transaction: remember the highest fence token seen for the resource, refuse a lower one (RT001).';

create function rota.complete(job_id bigint, fence_token bigint, result jsonb default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if octet_length(complete.result::text) > 8192 then
        raise exception using errcode = 'RT006', message = 'result must be at most 8 KiB as text',
            hint = 'Store what is large in a table of your own and return its key.';
    end if;
    with gone as (
        delete from rota.jobs
        where job_id = complete.job_id and fence_token = complete.fence_token and leased_by is not null
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, leased_by, attempt, handler, queue, unique_key,
            idempotency_key, meta
    )
    insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
        outcome, handler, queue, unique_key, idempotency_key, meta, result)
    select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), leased_by, attempt,
        'succeeded', handler, queue, unique_key, idempotency_key, meta, complete.result
    from gone;
    if not found then
        -- Also for a job that this very token has completed: a transaction that is played again must not commit again.
        raise exception using errcode = 'RT001',
            message = format('token %s is stale for job %s: the job has been settled, or belongs to a later claim',
                coalesce(complete.fence_token::text, 'NULL'), coalesce(complete.job_id::text, 'NULL')),
            hint = 'Roll back and stop: what this transaction did must not count.';
    end if;
    delete from rota.cancel_requests where job_id = complete.job_id;
end $$;
comment on function rota.complete is
    'In the caller''s transaction: settle the running job as succeeded, so that its effect and its end commit together.';


-- --------------------------------------------------------------------------------------------- cancel, reschedule, retry

-- 'cancelled': it is in the ledger. 'requested': it runs (or somebody has it locked), and its holder is told.
-- 'finished': it had ended before, or is a dead letter. Waits for no job's lock.
create function rota.cancel(job_id bigint, force boolean default null, note text default null) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(cancel.note);
    forced boolean := coalesce(cancel.force, false);
    stands text;
    owner text;
begin
    loop
        select rota.state_of(cancel.job_id), (select created_by from rota.jobs where job_id = cancel.job_id) into stands, owner;
        if stands is null then
            perform rota.refuse_unknown(cancel.job_id);
        elsif stands not in ('scheduled', 'running') then
            return 'finished';
        end if;
        perform rota.refuse_foreign(cancel.job_id, owner);

        with picked as materialized (
            select job_id from rota.jobs
            where job_id = cancel.job_id and (state = 'scheduled' or forced)
            for update skip locked
        ), gone as (
            delete from rota.jobs
            where job_id = any (array(select job_id from picked))
            returning job_id, schedule_id, scheduled_for, fence_token, started_at, leased_by, attempt, handler, queue,
                unique_key, idempotency_key, meta
        )
        insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
            outcome, handler, queue, unique_key, idempotency_key, meta, note)
        select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), leased_by, attempt,
            'cancelled', handler, queue, unique_key, idempotency_key, meta, rota.signed_note('cancelled', why)
        from gone;
        if found then
            delete from rota.cancel_requests where job_id = cancel.job_id;
            if stands = 'running' then
                perform pg_notify('rota_cancel', cancel.job_id::text);
            end if;
            if rota.is_operator() then
                insert into rota.audit (action, target, reason)
                values (case when forced then 'force cancel' else 'cancel' end, 'job ' || cancel.job_id, why);
            end if;
            return 'cancelled';
        end if;

        insert into rota.cancel_requests (job_id, requested_by, reason)
        values (cancel.job_id, rota.caller(), why)
        on conflict do nothing;
        if exists (select from rota.jobs where job_id = cancel.job_id) then
            perform pg_notify('rota_cancel', cancel.job_id::text);
            if rota.is_operator() then
                insert into rota.audit (action, target, reason) values ('request cancel', 'job ' || cancel.job_id, why);
            end if;
            return 'requested';
        end if;
        -- It ended while we looked: whoever settled it couldn't see this request.
        delete from rota.cancel_requests where job_id = cancel.job_id;
    end loop;
end $$;
comment on function rota.cancel is
    'Cancel a job of one''s own (operators: anybody''s). force ends a running one at once and makes its token stale.';

-- Jobs that wait are cancelled, oldest first, jobs that run are asked to stop; a row that is locked at this moment is left
-- for the next call. Call again until both numbers are 0.
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
    why text := rota.bounded_note(cancel_many.note);
    most integer := rota.bounded_limit(cancel_many."limit");
    ended bigint;
    asked bigint := 0;
begin
    if coalesce(cancel_many.handler, cancel_many.queue) is null then
        raise exception using errcode = 'RT006', message = 'handler or queue must be given',
            hint = 'Cancelling whatever there is, is no default. To stop everything, say rota.pause_queue(''*'').';
    end if;
    with picked as materialized (
        select job_id from rota.jobs
        where state = 'scheduled'
          and (cancel_many.handler is null or handler = cancel_many.handler)
          and (cancel_many.queue is null or queue = cancel_many.queue)
          and (cancel_many.before is null or run_at < cancel_many.before)
        order by job_id
        limit most
        for update skip locked
    ), gone as (
        delete from rota.jobs
        where job_id = any (array(select job_id from picked))
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, attempt, handler, queue, unique_key,
            idempotency_key, meta
    ), moot as (
        delete from rota.cancel_requests where job_id = any (array(select job_id from picked))
    )
    insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, note)
    select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), attempt, 'cancelled',
        handler, queue, unique_key, idempotency_key, meta, rota.signed_note('cancelled', why)
    from gone;
    get diagnostics ended = row_count;

    if ended < most then
        insert into rota.cancel_requests (job_id, requested_by, reason)
        select job_id, rota.caller(), why from rota.jobs
        where state = 'running'
          and (cancel_many.handler is null or handler = cancel_many.handler)
          and (cancel_many.queue is null or queue = cancel_many.queue)
          and (cancel_many.before is null or run_at < cancel_many.before)
          and not exists (select from rota.cancel_requests where cancel_requests.job_id = jobs.job_id)
        order by job_id
        limit most - ended
        on conflict do nothing;
        get diagnostics asked = row_count;
    end if;
    if asked > 0 then
        perform pg_notify('rota_cancel', '');
    end if;
    insert into rota.audit (action, target, reason, affected)
    values ('cancel many', concat_ws(', ', 'handler ' || cancel_many.handler, 'queue ' || cancel_many.queue,
        'due before ' || cancel_many.before), why, ended + asked);
    return query select ended, asked;
end $$;
comment on function rota.cancel_many is
    'Cancel live jobs of a handler, a queue or both, due (run_at) before an instant, at most limit (1000) of them.';

-- Returns the instant as stored. scheduled_for, and with it the idempotency key, stays.
create function rota.reschedule(job_id bigint, run_at timestamptz default null, note text default null) returns timestamptz
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(reschedule.note);
    stands text;
    owner text;
    due timestamptz;
begin
    loop
        select rota.state_of(reschedule.job_id), (select created_by from rota.jobs where job_id = reschedule.job_id)
        into stands, owner;
        if stands is null then
            perform rota.refuse_unknown(reschedule.job_id);
        elsif stands = 'running' then
            raise exception using errcode = 'RT004', message = format('job %s is running', reschedule.job_id),
                hint = 'Only a job that waits can be rescheduled. Cancel it, or wait for the end of this attempt.';
        elsif stands <> 'scheduled' then
            raise exception using errcode = 'RT004', message = format('job %s has ended: %s', reschedule.job_id, stands),
                hint = case stands when 'dead' then 'Send it back with rota.redrive() first.' else 'Enqueue a new job.' end;
        end if;
        perform rota.refuse_foreign(reschedule.job_id, owner);
        update rota.jobs set run_at = coalesce(reschedule.run_at, now())
        where job_id = reschedule.job_id and state = 'scheduled'
        returning run_at into due;
        if found then
            if rota.is_operator() then
                insert into rota.audit (action, target, reason) values ('reschedule', 'job ' || reschedule.job_id, why);
            end if;
            return due;
        end if;
    end loop;
end $$;
comment on function rota.reschedule is 'Make a waiting job due at another instant (NULL: now).';

-- Jobs that are locked at this moment are left for the next call.
create function rota.retry_now(
    handler text default null,
    queue text default null,
    "limit" integer default null,
    note text default null
) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(retry_now.note);
    most integer := rota.bounded_limit(retry_now."limit");
    woken bigint;
begin
    with picked as materialized (
        select job_id from rota.jobs
        where state = 'scheduled' and attempt > 0 and run_at > now()
          and (retry_now.handler is null or handler = retry_now.handler)
          and (retry_now.queue is null or queue = retry_now.queue)
        order by job_id
        limit most
        for update skip locked
    )
    update rota.jobs set run_at = now()
    where job_id = any (array(select job_id from picked));
    get diagnostics woken = row_count;
    insert into rota.audit (action, target, reason, affected)
    values ('retry now', coalesce(nullif(concat_ws(', ', 'handler ' || retry_now.handler, 'queue ' || retry_now.queue), ''),
        'whatever waits'), why, woken);
    return woken;
end $$;
comment on function rota.retry_now is
    'Make jobs that wait for their retry due at once, at most limit (1000); returns how many: call again until 0.';


-- -------------------------------------------------------------------------------------------------------- dead letters

-- Dead letters -> live jobs; returns those that went. One whose unique_key or exclusive schedule a live job has stays a
-- dead letter and hinders none of the others. For redrive() and redrive_many().
create function rota.send_back(job_ids bigint[], payload jsonb, spread interval) returns bigint[]
    language sql as $$
    with picked as materialized (
        select job_id, scheduled_for, created_at, fence_token, schedule_id, max_attempts, priority, exclusive,
            handler, queue, created_by, coalesce(send_back.payload, dead_letters.payload) as payload, delivery, backoff_base,
            backoff_cap, timeout, lease, unique_key, idempotency_key, meta, checkpoint
        from rota.dead_letters
        where job_id = any (send_back.job_ids)
        order by job_id
        for update
    ), fresh as (
        -- fence_token stays: it says that this job has been claimed before.
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
        from picked
        order by job_id
        on conflict do nothing
        returning job_id
    ), gone as (
        delete from rota.dead_letters where job_id = any (array(select job_id from fresh))
    ), moot as (
        delete from rota.cancel_requests where job_id = any (array(select job_id from fresh))
    )
    select coalesce(array_agg(job_id), '{}') from fresh
$$;

create function rota.refuse_not_dead(job_id bigint) returns void
    language plpgsql as $$
declare
    stands text := rota.state_of(refuse_not_dead.job_id);
begin
    if stands is null then
        perform rota.refuse_unknown(refuse_not_dead.job_id);
    end if;
    raise exception using errcode = 'RT004',
        message = format('job %s is no dead letter: %s', refuse_not_dead.job_id, stands),
        hint = case when stands in ('scheduled', 'running') then 'It is live: rota.cancel() or rota.reschedule() act on it.'
                    else 'It has ended: enqueue a new job.' end;
end $$;

create function rota.redrive(job_id bigint, payload jsonb default null, note text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(redrive.note);
    blocker bigint;
begin
    for turn in 1..20 loop
        perform from rota.dead_letters where job_id = redrive.job_id;
        if not found then
            perform rota.refuse_not_dead(redrive.job_id);
        end if;
        if rota.send_back(array[redrive.job_id], redrive.payload, null) <> '{}' then
            insert into rota.audit (action, target, reason)
            values (case when redrive.payload is null then 'redrive' else 'redrive with another payload' end,
                'job ' || redrive.job_id, why);
            return;
        end if;
        select coalesce(
            (select jobs.job_id from rota.jobs where jobs.handler = letter.handler and jobs.unique_key = letter.unique_key),
            (select jobs.job_id from rota.jobs where jobs.exclusive and jobs.schedule_id = letter.schedule_id))
        into blocker
        from rota.dead_letters as letter where letter.job_id = redrive.job_id;
        -- None: it has ended meanwhile.
        if blocker is not null then
            raise exception using errcode = 'RT005',
                message = format('job %s stays a dead letter: live job %s has its unique_key or its schedule',
                    redrive.job_id, blocker),
                hint = format('Redrive it when job %s has ended; cancel that one, or discard this one.', blocker);
        end if;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('the unique_key of job %s changed hands too often to be taken', redrive.job_id),
        hint = 'It is still a dead letter: try again.';
end $$;
comment on function rota.redrive is
    'Send a dead letter back to the live jobs, with its job_id, idempotency key, checkpoint and history, and attempts afresh.';

-- Oldest job first. Those left out (a live job has their unique_key or exclusive schedule) stay dead letters, and the next
-- ones take their place. Call again until redriven is 0.
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
    why text := rota.bounded_note(redrive_many.note);
    most integer := rota.bounded_limit(redrive_many."limit");
    passed bigint := 0;
    sent bigint := 0;
    stayed bigint := 0;
    batch bigint[];
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
        went := cardinality(rota.send_back(batch, null, redrive_many.spread));
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
comment on function rota.redrive_many is
    'Redrive dead letters, at most limit (1000), evenly over spread; at_most_once ones only with include_at_most_once.';

create function rota.discard_letters(job_ids bigint[], note text) returns bigint
    language sql as $$
    with gone as (
        delete from rota.dead_letters
        where job_id = any (discard_letters.job_ids)
        returning job_id, schedule_id, scheduled_for, fence_token, started_at, node, attempt, handler, queue, unique_key,
            idempotency_key, meta
    ), ended as (
        insert into rota.job_runs (job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts,
            outcome, handler, queue, unique_key, idempotency_key, meta, note)
        select job_id, schedule_id, scheduled_for, fence_token, started_at, clock_timestamp(), node, attempt,
            'discarded', handler, queue, unique_key, idempotency_key, meta, rota.signed_note('discarded', discard_letters.note)
        from gone
        returning job_id
    )
    select count(*) from ended
$$;

create function rota.discard(job_id bigint, note text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(discard.note);
begin
    if rota.discard_letters(array[discard.job_id], why) = 0 then
        perform rota.refuse_not_dead(discard.job_id);
    end if;
    insert into rota.audit (action, target, reason) values ('discard', 'job ' || discard.job_id, why);
end $$;
comment on function rota.discard is 'End a dead letter: into the ledger as discarded, with who and why.';

-- Letters that are locked at this moment are left for the next call.
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
    why text := rota.bounded_note(discard_many.note);
    most integer := rota.bounded_limit(discard_many."limit");
    batch bigint[];
    ended bigint;
begin
    if coalesce(discard_many.handler, discard_many.queue, discard_many.reason, discard_many.error_kind,
                discard_many.before::text) is null then
        raise exception using errcode = 'RT006', message = 'a handler, queue, reason, error_kind or before must be given',
            hint = 'Discarding whatever there is, is no default. before => now() says that you mean it.';
    end if;
    batch := array(
        select job_id from rota.dead_letters
        where (discard_many.handler is null or handler = discard_many.handler)
          and (discard_many.queue is null or queue = discard_many.queue)
          and (discard_many.reason is null or reason = discard_many.reason)
          and (discard_many.error_kind is null or error_kind = discard_many.error_kind)
          and (discard_many.before is null or finished_at < discard_many.before)
        order by job_id
        limit most
        for update skip locked);
    ended := rota.discard_letters(batch, why);
    insert into rota.audit (action, target, reason, affected)
    values ('discard many', concat_ws(', ', 'handler ' || discard_many.handler, 'queue ' || discard_many.queue,
        'reason ' || discard_many.reason, 'error kind ' || discard_many.error_kind, 'dead before ' || discard_many.before),
        why, ended);
    return ended;
end $$;
comment on function rota.discard_many is
    'End dead letters, at most limit (1000); returns how many: call again until 0. At least one filter must be given.';


-- ----------------------------------------------------------------------------------------------------- pause and resume

-- All four return whether anything has changed. A pause keeps jobs from being claimed; what runs, runs on.
create function rota.refuse_bad_name(name text) returns void
    language plpgsql as $$
begin
    if rota.is_name(refuse_bad_name.name) is not true then
        raise exception using errcode = 'RT006', message = 'name must be a name of 1 to 200 characters on one line',
            hint = 'rota.handlers lists the handlers that daemons have registered, and their queues.';
    end if;
end $$;

create function rota.pause_queue(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(pause_queue.reason);
begin
    perform rota.refuse_bad_name(pause_queue.name);
    if pause_queue.name not in ('*', 'default')
       and not exists (select from rota.nodes where pause_queue.name = any (queues))
       and not exists (select from rota.handlers where queue = pause_queue.name)
       and not exists (select from rota.jobs where queue = pause_queue.name and state = 'scheduled') then
        raise notice 'no daemon, handler or waiting job names a queue %: it is paused all the same', pause_queue.name;
    end if;
    insert into rota.queues as known (queue, paused, pause_reason, paused_by, paused_at)
    values (pause_queue.name, true, why, rota.caller(), clock_timestamp())
    on conflict (queue) do update
    set paused = true, pause_reason = excluded.pause_reason, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where not known.paused or known.pause_reason is distinct from coalesce(excluded.pause_reason, known.pause_reason);
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('pause', 'queue ' || pause_queue.name, why);
    return true;
end $$;
comment on function rota.pause_queue is 'Keep the jobs of a queue (*: of all queues) from being claimed.';

create function rota.pause_handler(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(pause_handler.reason);
begin
    perform rota.refuse_bad_name(pause_handler.name);
    if not exists (select from rota.handlers where handler = pause_handler.name and seen_at is not null) then
        raise notice 'no daemon has ever registered a handler %: it is paused all the same', pause_handler.name;
    end if;
    insert into rota.handlers as known (handler, paused, pause_reason, paused_by, paused_at)
    values (pause_handler.name, true, why, rota.caller(), clock_timestamp())
    on conflict (handler) do update
    set paused = true, pause_reason = excluded.pause_reason, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where not known.paused or known.pause_reason is distinct from coalesce(excluded.pause_reason, known.pause_reason);
    if not found then
        return false;
    end if;
    insert into rota.audit (action, target, reason) values ('pause', 'handler ' || pause_handler.name, why);
    return true;
end $$;
comment on function rota.pause_handler is 'Keep the jobs of a handler from being claimed.';

create function rota.resume_queue(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(resume_queue.reason);
begin
    update rota.queues set paused = false, pause_reason = null, paused_by = null, paused_at = null
    where queue = resume_queue.name and paused;
    if not found then
        return false;
    end if;
    perform pg_notify('rota_wake', '');
    insert into rota.audit (action, target, reason) values ('resume', 'queue ' || resume_queue.name, why);
    return true;
end $$;
comment on function rota.resume_queue is 'Let the jobs of a paused queue be claimed again.';

create function rota.resume_handler(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    why text := rota.bounded_note(resume_handler.reason);
begin
    update rota.handlers set paused = false, pause_reason = null, paused_by = null, paused_at = null
    where handler = resume_handler.name and paused;
    if not found then
        return false;
    end if;
    perform pg_notify('rota_wake', '');
    insert into rota.audit (action, target, reason) values ('resume', 'handler ' || resume_handler.name, why);
    return true;
end $$;
comment on function rota.resume_handler is 'Let the jobs of a paused handler be claimed again.';

-- PostgreSQL lets everybody execute a new function; who may call what is granted by role, elsewhere.
revoke all on all functions in schema rota from public;
