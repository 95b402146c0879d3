-- Create the four roles and grant their rights. `rota migrate --roles` runs this script after the migrations, in one transaction with
-- the setting rota.role_prefix. It may run again at any time. After each later migration, `rota migrate` runs it again.
--
-- The roles cannot log in: people and programs have their own logins, which are members (grant rota_client to shop).
-- Only daemons write the daemons' columns, such as state, fence_token, schedule_id and created_by.

do $roles$
declare
    prefix constant text := coalesce(nullif(current_setting('rota.role_prefix', true), ''), 'rota');
    owner constant text := prefix || '_owner';
    daemon constant text := prefix || '_daemon';
    operator constant text := prefix || '_operator';
    client constant text := prefix || '_client';
    migrator constant text := current_user;
    version constant integer := current_setting('server_version_num');
    is_superuser constant boolean := (select rolsuper from pg_roles where rolname = current_user);
    each record;
    missing_roles text[];
    may_change_owner boolean;
begin
    if prefix !~ '^[a-z_][a-z0-9_]{0,49}$' or starts_with(prefix, 'pg_') then
        raise exception using errcode = 'RT006', message = format('%L cannot be the prefix of roles', left(prefix, 60)),
            hint = 'Use up to 50 lower-case letters, digits and underscores. It must not begin with a digit or pg_.';
    end if;
    if to_regnamespace('rota') is null then
        raise exception using errcode = 'invalid_schema_name', message = 'there is no schema rota yet',
            hint = 'Run `rota migrate` first.';
    end if;

    -- -------------------------------------------------------------------------------------------------- create the roles
    missing_roles := array(select role_name from unnest(array[owner, daemon, operator, client]) as role_name
                           where role_name not in (select rolname from pg_roles));
    if missing_roles <> '{}' and not (select rolsuper or rolcreaterole from pg_roles where rolname = migrator) then
        raise exception using errcode = 'insufficient_privilege',
            message = format('%I may not create roles, and these are missing: %s', migrator, array_to_string(missing_roles, ', ')),
            hint = format('An administrator must run: alter role %I createrole; or: %s grant %I to %I; then run this again.',
                migrator, (select string_agg(format('create role %I;', role_name), ' ') from unnest(missing_roles) as role_name),
                owner, migrator);
    end if;
    for each in select role_name as name from unnest(missing_roles) as role_name loop
        begin
            execute format('create role %I nologin', each.name);
        exception when duplicate_object or unique_violation then
            null;  -- another database's migrator created it meanwhile: roles belong to the whole server
        end;
    end loop;

    -- ------------------------------------------------------------------------------------------------- change the owner
    -- From PostgreSQL 16 on, a login that creates a role may grant it, but is not a member of it.
    if not is_superuser and not pg_has_role(migrator, owner, 'USAGE') then
        begin
            execute format('grant %I to %I', owner, migrator)
                || case when version >= 160000 then ' with inherit true, set true' else '' end;
        exception when insufficient_privilege then
            null;  -- reported below
        end;
    end if;
    for each in
        select kind, name, current_owner from (
            select 'schema' as kind, 'rota' as name, nspowner as current_owner from pg_namespace where nspname = 'rota'
            union all
            select 'table', oid::regclass::text, relowner from pg_class
            where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v', 'S')
            union all
            select 'function', oid::regprocedure::text, proowner from pg_proc where pronamespace = 'rota'::regnamespace
        ) as objects
        where not is_superuser and not pg_has_role(migrator, current_owner, 'USAGE')
        limit 1
    loop
        raise exception using errcode = 'insufficient_privilege',
            message = format('the %s %s belongs to %s, and %I is not a member of that role',
                each.kind, each.name, each.current_owner::regrole, migrator),
            hint = format('Run this as %1$s, or an administrator must run: grant %1$s to %2$I;', each.current_owner::regrole, migrator);
    end loop;

    may_change_owner := is_superuser
        or pg_has_role(migrator, owner, 'USAGE')
            and pg_has_role(migrator, owner, case when version >= 160000 then 'SET' else 'MEMBER' end)
            and has_database_privilege(migrator, current_database(), 'CREATE');
    if may_change_owner then
        if (select nspowner::regrole::text from pg_namespace where nspname = 'rota') <> quote_ident(owner) then
            execute format('alter schema rota owner to %I', owner);
        end if;
        -- Sequences of columns change with their tables.
        for each in
            select oid::regclass as name from pg_class
            where relnamespace = 'rota'::regnamespace and relowner::regrole::text <> quote_ident(owner)
              and (relkind in ('r', 'p', 'v') or relkind = 'S' and not exists (
                  select from pg_depend where objid = pg_class.oid and classid = 'pg_class'::regclass and deptype in ('a', 'i')))
        loop
            execute format('alter table %s owner to %I', each.name, owner);
        end loop;
        for each in
            select oid::regprocedure as name from pg_proc
            where pronamespace = 'rota'::regnamespace and proowner::regrole::text <> quote_ident(owner)
        loop
            execute format('alter function %s owner to %I', each.name, owner);
        end loop;
    else
        raise notice 'the schema rota still belongs to %, and its functions run with those rights: % may not give it to %',
            (select nspowner::regrole from pg_namespace where nspname = 'rota'), migrator, owner
            using hint = format('An administrator must run: grant %I to %I; grant create on database %I to %I; then run this again.',
                owner, migrator, current_database(), migrator);
    end if;

    -- ------------------------------------------------------------------------------------------------- revoke everything
    -- This removes rights that this version no longer grants. The grants follow in the same transaction, so no session lacks a right.
    execute format('revoke all on schema rota from public, %I, %I, %I', daemon, operator, client);
    execute format('revoke all on all tables in schema rota from public, %I, %I, %I', daemon, operator, client);
    execute format('revoke all on all sequences in schema rota from public, %I, %I, %I', daemon, operator, client);
    execute format('revoke all on all functions in schema rota from public, %I, %I, %I', daemon, operator, client);
    execute format('grant usage on schema rota to %I, %I, %I', daemon, operator, client);

    -- ------------------------------------------------------------------------------------------------- tables and views
    -- A relation that does not exist in this version of the schema is skipped.
    for each in
        select grantee, privileges, relation
        from (values
            -- INSERT … RETURNING and ON CONFLICT (…) also need SELECT.
            (array[client, operator], 'insert (handler, payload, queue, priority, run_at, max_attempts, backoff_base, backoff_cap, '
                'retry_for, timeout, lease, delivery, start_by, unique_key, idempotency_key, meta, limit_key)', 'jobs'),
            (array[client], 'select (job_id, state, scheduled_for, handler, payload, queue, priority, run_at, max_attempts, '
                'backoff_base, backoff_cap, retry_for, timeout, lease, delivery, start_by, unique_key, idempotency_key, meta, limit_key)', 'jobs'),
            (array[client], 'select (handler, queue)', 'handlers'),  -- for the trigger fill_in, which runs as the caller
            (array[client], 'select', 'meta'),
            (array[client], 'select', 'job_status'),
            (array[client], 'select', 'fire_history'),
            -- Without DELETE, which would allow LOCK TABLE: a lock on this view also locks its tables, which each claim reads.
            (array[client, operator], 'select', 'schedules'),
            (array[client, operator], 'insert (name, cron, every, timezone, handler, payload, queue, priority, max_attempts, '
                'backoff_base, backoff_cap, retry_for, timeout, lease, delivery, start_within, meta, start_at, end_at, paused, '
                'resume_at, misfire, on_time_within, too_late_after, catch_up_limit, overlap, dst_gap, dst_fold, jitter, '
                'description, owner, expect_success_within, limit_key), '
                'update (name, cron, every, timezone, handler, payload, queue, priority, max_attempts, '
                'backoff_base, backoff_cap, retry_for, timeout, lease, delivery, start_within, meta, start_at, end_at, paused, '
                'resume_at, misfire, on_time_within, too_late_after, catch_up_limit, overlap, dst_gap, dst_fold, jitter, '
                'description, owner, expect_success_within, limit_key)', 'schedules'),

            -- SELECT … FOR UPDATE needs UPDATE.
            (array[daemon], 'select, insert, update, delete', 'jobs'),
            (array[daemon], 'select, insert, update, delete', 'dead_letters'),
            (array[daemon], 'select, insert, update, delete', 'attempts'),
            (array[daemon], 'select, insert, update, delete', 'cancel_requests'),
            (array[daemon], 'select, insert, update, delete', 'guards'),
            (array[daemon], 'select, insert, update, delete', 'nodes'),
            (array[daemon], 'select, insert, update, delete', 'lost_nodes'),
            (array[daemon], 'select, insert, update', 'housekeeping'),
            (array[daemon], 'select, insert', 'job_runs'),
            (array[daemon], 'select, insert (handler, app, release, queue, max_attempts, backoff_base, backoff_cap, timeout, '
                'delivery, seen_at), update (app, release, queue, max_attempts, backoff_base, backoff_cap, timeout, delivery, '
                'seen_at)', 'handlers'),
            (array[daemon], 'select', 'queues'),
            (array[daemon], 'select, update (planned_with)', 'meta'),
            (array[daemon], 'select', 'migrations'),
            (array[daemon], 'select', 'job_status'),
            (array[daemon], 'select, insert, update, delete', 'schedules'),
            (array[daemon], 'select, insert, update, delete', 'schedule_definitions'),
            (array[daemon], 'select, insert, update, delete', 'schedule_clocks'),
            (array[daemon], 'select, insert, update, delete', 'fires'),
            (array[operator], 'insert (key, max_running, max_starts, per, weight, held_until, hold_reason, note), '
                'update (key, max_running, max_starts, per, weight, held_until, hold_reason, note), delete', 'limits'),
            (array[daemon], 'select, insert (key, max_running, max_starts, per, declared_by, declared), '
                'update (max_running, max_starts, per, declared_by, declared), delete', 'limits'),
            (array[daemon], 'select, delete', 'limit_holds'),
            (array[daemon], 'select, insert, delete', 'limit_starts'),
            (array[daemon], 'select, update', 'limit_locks')
        ) as given (grantees, privileges, relation)
        cross join unnest(grantees) as grantee
        where to_regclass('rota.' || relation) is not null
    loop
        execute format('grant %s on rota.%I to %I', each.privileges, each.relation, each.grantee);
    end loop;
    -- Operators may read every table. They change rows only through functions, which record the change in rota.audit.
    for each in
        select oid::regclass as name from pg_class
        where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v') and not relispartition
    loop
        execute format('grant select on %s to %I', each.name, operator);
    end loop;
    execute format('grant usage, select, update on sequence rota.fence_tokens to %I', daemon);
    execute format('grant usage, select on sequence rota.jobs_job_id_seq to %I', daemon);

    -- -------------------------------------------------------------------------------------------------------- functions
    for each in
        select grantee, proc.oid::regprocedure as name
        from (values
            (array[client, operator, daemon], '{enqueue, put_job, replace_job, cancel, put_schedule, remove_schedule, ran, '
                'jitter_offset}'::text[]),
            -- CHECKs and triggers call these with the rights of the session that writes.
            (array[client, operator, daemon], '{is_duration, is_name, is_cron, cron_value, caller, current_server}'),
            -- The right to call cancel_many() makes a role an operator: see rota.is_operator().
            (array[operator], '{cancel_many, reschedule, retry_now, redrive, redrive_many, discard, discard_many}'),
            (array[operator], '{pause_queue, resume_queue, pause_handler, resume_handler, forget_node}'),
            (array[operator], '{set_limit, remove_limit, limit_of, starts_left, permits_left}'),
            (array[operator, daemon], '{hold_limit}'),
            (array[operator], '{pause_schedule, pause_schedules, resume_schedule, resume_schedules, run_schedule_now, '
                'backfill_schedule}'),
            (array[daemon], '{complete, guard, rotate_ledger, prune_audit, note_housekeeping, raise_fence_tokens, tell, bounded_duration, '
                'request_cancellations}'),
            (array[daemon], '{claim_limited_jobs, limit_of, starts_left, permits_left, extend_hold}')
        ) as given (grantees, functions)
        cross join unnest(grantees) as grantee
        join pg_proc as proc on proc.proname = any (functions) and proc.pronamespace = 'rota'::regnamespace
    loop
        execute format('grant execute on function %s to %I', each.name, each.grantee);
    end loop;
end $roles$;
