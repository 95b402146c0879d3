-- What a client leaves open or breaks off is nobody else's standstill: an insert that is cancelled, a redrive whose transaction lasts.

-- The lock is taken and given back within one expression. Between two statements a cancel would end the function, and the lock,
-- which is the session's, would stay: no dispatcher could hold its own beside it, and every insert would notify.
create or replace function rota.wake_dispatchers() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not (pg_try_advisory_lock(1919906913, 1) and pg_advisory_unlock(1919906913, 1)) then
        perform pg_notify('rota_wake', '');
    end if;
    return null;
end $$;

create or replace function rota.wake_schedulers() returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not (pg_try_advisory_lock(1919906913, 1) and pg_advisory_unlock(1919906913, 1)) then
        perform pg_notify('rota_wake', 'schedules');
    end if;
end $$;

-- Dead letters -> live jobs; returns those that went. One whose unique_key or exclusive schedule a live job has stays a
-- dead letter and hinders none of the others. For redrive() and redrive_many().
create or replace function rota.send_back(job_ids bigint[], payload jsonb, spread interval) returns bigint[]
    language sql as $$
    -- Daemons step over a schedule whose clock is locked. Without this, their insert of its next job would wait for the end of
    -- this transaction, to know whether the job that goes back here is live, and the fires of all other schedules with it.
    select from rota.schedule_clocks
    where schedule_id = any (array(
        select schedule_id from rota.dead_letters where job_id = any (send_back.job_ids) and exclusive))
    order by schedule_id
    for update;

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
