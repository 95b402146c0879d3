-- Check payload and meta when a client inserts or replaces a job, and not again when rota inserts a schedule's job, or puts a claimed
-- job back. For a payload of 1 MiB a check takes some 30 ms, so a batch of such jobs took longer than a daemon waits for an answer.
-- Clients can set neither schedule_id nor fence_token. NOT VALID: jobs that are stored already passed a stricter check.
alter table rota.jobs
    drop constraint "payload must be at most 1 MiB as text, and at most 100 deep",
    drop constraint "meta must be an object of at most 64 KiB",
    add constraint "payload must be at most 1 MiB as text, and at most 100 deep" check (
        state = 'running' or fence_token is not null or schedule_id is not null
        or octet_length(payload::text) <= 1048576
            -- A document of 100 levels has at least 800 bytes: shorter ones, nearly all of them, skip the path query.
            and (pg_column_size(payload #> '{}') < 800 or not jsonb_path_exists(payload, 'strict $.**{101}'))
    ) not valid,
    add constraint "meta must be an object of at most 64 KiB" check (
        state = 'running' or fence_token is not null or schedule_id is not null
        or jsonb_typeof(meta) = 'object' and octet_length(meta::text) <= 65536
    ) not valid;

-- The job has been claimed before, so the constraint does not check the new payload.
create or replace function rota.redrive(job_id bigint, payload jsonb default null, note text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(redrive.note);
    blocking_job_id bigint;
begin
    if octet_length(redrive.payload::text) > 1048576 or jsonb_path_exists(redrive.payload, 'strict $.**{101}') then
        raise exception using errcode = 'check_violation',
            message = 'payload must be at most 1 MiB as text, and at most 100 deep',
            hint = 'Give a smaller payload, or none: then the job keeps its own.';
    end if;
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
