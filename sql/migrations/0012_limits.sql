-- Limits: how many jobs of a key run at once, how many start in an interval, and fair turns between keys. docs/design.md explains the
-- design. Daemons of the schema before keep working beside this one: they never claim a job that has a key.

-- ------------------------------------------------------------------------------------------------------------- columns

-- A waiting job with a key has its own states, so that a claim that knows nothing of limits does not find it: waiting until run_at,
-- then limited. An index over both would hold the future jobs, which every search for due ones would step over.
alter table rota.jobs
    add column limit_key text collate "C"
        constraint "limit_key must have 1 to 200 characters, at most 512 bytes"
            check (state = 'running' or length(limit_key) between 1 and 200 and octet_length(limit_key) <= 512
                   and limit_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]')
        constraint "limit_key must not begin with handler: or queue:"
            check (state = 'running' or not starts_with(limit_key, 'handler:') and not starts_with(limit_key, 'queue:')),
    drop constraint "state must be scheduled or running",
    add constraint "state must be scheduled, waiting, limited or running"
        check (case when state in ('scheduled', 'running') then state = 'running' or limit_key is null
               else state in ('waiting', 'limited') and limit_key is not null end);

alter table rota.dead_letters add column limit_key text collate "C";

alter table rota.schedule_definitions
    add column limit_key text collate "C"
        constraint "limit_key must have 1 to 200 characters, at most 512 bytes"
            check (length(limit_key) between 1 and 200 and octet_length(limit_key) <= 512
                   and limit_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]')
        constraint "limit_key must not begin with handler: or queue:"
            check (not starts_with(limit_key, 'handler:') and not starts_with(limit_key, 'queue:'));

-- The due jobs with a key. A claim walks the keys of one queue and priority by one probe each, and finds the first job of a key and
-- handler by one probe. The second column separates suspects, as in claim_due_jobs_idx.
create index claim_limited_jobs_idx on rota.jobs (queue, (losses / 2), priority, limit_key, handler, run_at, job_id)
    where state = 'limited';
create index admit_waiting_jobs_idx on rota.jobs (run_at) where state = 'waiting';
create index expire_unstarted_limited_jobs_idx on rota.jobs (start_by)
    where start_by is not null and state in ('waiting', 'limited') and fence_token is null;
-- The permits of a key: the jobs that have an owner. By the owner and not by the state, because the planner would use
-- find_expired_leases_idx for a condition on the state.
create index count_permits_idx on rota.jobs (limit_key, fence_token) where leased_by is not null and limit_key is not null;


-- -------------------------------------------------------------------------------------------------------------- tables

create table rota.limits (
    key           text collate "C" primary key
        -- 'handler:' and a handler's name.
        constraint "key must have 1 to 208 characters, at most 808 bytes"
            check (length(key) between 1 and 208 and octet_length(key) <= 808 and key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]')
        constraint "key must not be handler: or queue: without a name" check (key not in ('handler:', 'queue:')),
    max_running   integer constraint "max_running must not be negative" check (max_running >= 0),
    max_starts    integer constraint "max_starts must lie between 1 and 100000" check (max_starts between 1 and 100000),
    per           interval
        constraint "per must lie between 1 second and 31 days, without months"
            check (rota.is_duration(per) and per between interval '1 second' and interval '31 days'),
    weight        integer constraint "weight must lie between 1 and 1000" check (weight between 1 and 1000),
    held_until    timestamptz
        constraint "held_until must lie between the years 1970 and 2200" check (held_until >= timestamptz '1970-01-01 00:00:00+00' and held_until < timestamptz '2200-01-01 00:00:00+00'),
    hold_reason   text constraint "hold_reason must have at most 1000 characters" check (length(hold_reason) <= 1000),
    note          text constraint "note must have at most 1000 characters" check (length(note) <= 1000),
    declared_by   text constraint "declared_by must be a name of 1 to 200 characters on one line" check (rota.is_name(declared_by)),
    declared      jsonb constraint "declared must be an object of at most 64 KiB" check (jsonb_typeof(declared) = 'object' and octet_length(declared::text) <= 65536),
    changed_at    timestamptz not null default clock_timestamp(),
    constraint "max_starts and per belong together" check (num_nonnulls(max_starts, per) <> 1),
    constraint "weight is for clients' keys, not for handler: and queue:"
        check (weight is null or not starts_with(key, 'handler:') and not starts_with(key, 'queue:'))
);
comment on table rota.limits is
    'How many jobs of a key run at once (max_running), how many start within an interval (max_starts, per), and how many start in one turn '
    '(weight). A key that ends in * is for all keys with that beginning, each of which has its own allowance. The row with the exact key '
    'applies, else the longest one that ends in *. handler:NAME and queue:NAME limit all jobs of a handler or queue.';
create index limit_patterns_idx on rota.limits (key) where right(key, 1) = '*';

-- Holds of keys that have no row of their own in rota.limits: such a row would replace the one that ends in *.
create table rota.limit_holds (
    key           text collate "C" primary key,
    held_until    timestamptz not null,
    reason        text,
    held_at       timestamptz not null default clock_timestamp()
);
comment on table rota.limit_holds is 'Keys from which no job starts until held_until: see rota.hold_limit(). A key with a row in rota.limits is held there.';

-- Numbered starts of the keys with max_starts. Start n may happen once start n - max_starts is older than the interval. The rows
-- are only inserted, and deleted when they are too old to matter, so there is no counter to repair.
create table rota.limit_starts (
    key           text collate "C" not null,
    number        bigint not null,
    started_at    timestamptz not null,
    primary key (key, number)
);
comment on table rota.limit_starts is 'The latest starts of keys with max_starts, numbered in the order of their claims.';

-- A claim locks the row of a key's hash before it counts the key's permits, so that no two sessions count at the same time. Any login
-- can hold an advisory lock; only daemons may lock these rows.
create table rota.limit_locks (
    lock_id       integer primary key
);
insert into rota.limit_locks (lock_id) select lock_id from generate_series(0, 4095) as lock_id;
comment on table rota.limit_locks is 'Rows that claims of limited jobs lock, by the hash of the key. They never change.';


-- ---------------------------------------------------------------------------------------------------- the limit of a key

-- These three are inlined into the statements that call them, which a SET clause would prevent. Their bodies are parsed here, so
-- their names cannot be resolved in another schema.

create function rota.limit_of(key text) returns setof rota.limits
    language sql stable rows 1
begin atomic
    select limits.*
    from rota.limits
    where limits.key = limit_of.key
    union all
    (
        select limits.*
        from rota.limits
        where right(limits.key, 1) = '*'
          and starts_with(limit_of.key, left(limits.key, -1))
          -- * and h* are for clients' keys only.
          and starts_with(limit_of.key, 'handler:') = starts_with(limits.key, 'handler:')
          and starts_with(limit_of.key, 'queue:') = starts_with(limits.key, 'queue:')
        order by length(limits.key) desc
        limit 1
    )
    limit 1;
end;
comment on function rota.limit_of is 'The row of rota.limits that applies to a key: the exact one, else the longest pattern that ends in *. No row: no limit.';

-- How many of `wanted` starts a key with max_starts may have at an instant, and when it may have the next one.
create function rota.starts_left(
    key text, max_starts integer, per interval, at timestamptz, wanted integer,
    out free integer, out last_number bigint, out reopens_at timestamptz
) returns setof record
    language sql stable rows 1
begin atomic
    select least(wanted, max_starts) - (
            select count(*)::integer
            from rota.limit_starts as start
            where start.key = starts_left.key
              and start.number > latest.number - max_starts
              and start.number <= latest.number - max_starts + least(wanted, max_starts)
              and start.started_at >= at - per
        ),
        latest.number,
        (
            select start.started_at + per
            from rota.limit_starts as start
            where start.key = starts_left.key
              and start.number = latest.number - max_starts + 1
        )
    from (
        select coalesce((
            select start.number from rota.limit_starts as start where start.key = starts_left.key order by start.number desc limit 1
        ), 0) as number
    ) as latest
    where max_starts is not null;
end;

-- How many more jobs with a limit_key may run; NULL without max_running.
create function rota.permits_left(key text, max_running integer, out free integer) returns setof integer
    language sql stable rows 1
begin atomic
    select max_running - case when max_running is not null then (
            select count(*)::integer
            from (
                select from rota.jobs as holder
                where holder.leased_by is not null
                  and holder.limit_key = permits_left.key
                limit max_running
            ) as counted
        ) end;
end;

create function rota.check_limit() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    new.changed_at := clock_timestamp();
    if right(new.key, 1) = '*' and (select count(*) from rota.limits where right(key, 1) = '*' and key <> new.key) >= 200 then
        raise exception using errcode = 'RT006', message = format('there are 200 limits that end in * already, so %L is refused', new.key),
            hint = 'Remove one, or give keys a common beginning that one limit covers.';
    end if;
    return new;
end $$;

create trigger check_limit before insert or update on rota.limits for each row execute function rota.check_limit();

-- Jobs that wait for this limit may start now. SECURITY DEFINER, because operators may neither notify nor write the audit themselves.
create function rota.tell_of_limits() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota.tell('rota_wake', '');
    return null;
end $$;

create trigger tell after insert or update or delete or truncate on rota.limits
    for each statement execute function rota.tell_of_limits();
create trigger tell after insert or update or delete or truncate on rota.limit_holds
    for each statement execute function rota.tell_of_limits();

create function rota.audit_limit() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    row_now rota.limits := case tg_op when 'DELETE' then old else new end;
begin
    insert into rota.audit (action, target, reason)
    values (case tg_op when 'DELETE' then 'remove' else 'set' end, 'limit ' || row_now.key, concat_ws(', ',
        'max_running ' || row_now.max_running, 'max_starts ' || row_now.max_starts || ' per ' || row_now.per,
        'weight ' || row_now.weight, row_now.note));
    return null;
end $$;

create trigger audit after insert or delete on rota.limits for each row execute function rota.audit_limit();
create trigger audit_change after update on rota.limits for each row
    when ((new.key, new.max_running, new.max_starts, new.per, new.weight, new.note)
          is distinct from (old.key, old.max_running, old.max_starts, old.per, old.weight, old.note))
    execute function rota.audit_limit();

create function rota.set_limit(
    key text,
    max_running integer default null,
    max_starts integer default null,
    per interval default null,
    weight integer default null,
    note text default null
) returns void
    language sql set search_path = pg_catalog, pg_temp as $$
    insert into rota.limits (key, max_running, max_starts, per, weight, note)
    values (set_limit.key, set_limit.max_running, set_limit.max_starts, set_limit.per, set_limit.weight, set_limit.note)
    on conflict (key) do update
    set max_running = excluded.max_running, max_starts = excluded.max_starts, per = excluded.per, weight = excluded.weight,
        note = excluded.note
$$;
comment on function rota.set_limit is 'Insert a limit, or set all values of the limit with that key (NULL: none). A hold stays.';

create function rota.remove_limit(key text) returns boolean
    language sql set search_path = pg_catalog, pg_temp as $$
    with deleted_limits as (
        delete from rota.limits where limits.key = remove_limit.key returning 1
    )
    select exists (select from deleted_limits)
$$;
comment on function rota.remove_limit is 'Remove a limit. Returns false if there is no such limit. For the key of one tenant, the limit of its pattern applies again.';

-- A key without its own row keeps the limits of the pattern that it matches.
create function rota.put_hold(key text, until timestamptz, reason text, only_later boolean) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if put_hold.key is null or length(put_hold.key) not between 1 and 208 then
        raise exception using errcode = 'RT006', message = 'key must have 1 to 208 characters',
            hint = 'Give the limit_key of the jobs, or handler:NAME, or queue:NAME.';
    end if;
    update rota.limits
    set held_until = put_hold.until, hold_reason = rota.bounded_note(put_hold.reason)
    where limits.key = put_hold.key
      and (put_hold.only_later and limits.held_until >= put_hold.until) is not true;
    if put_hold.until is null or exists (select from rota.limits where limits.key = put_hold.key) then
        delete from rota.limit_holds where limit_holds.key = put_hold.key;
        return;
    end if;
    insert into rota.limit_holds as existing (key, held_until, reason)
    values (put_hold.key, put_hold.until, rota.bounded_note(put_hold.reason))
    on conflict on constraint limit_holds_pkey do update
    set held_until = excluded.held_until, reason = excluded.reason, held_at = excluded.held_at
    where (put_hold.only_later and existing.held_until >= excluded.held_until) is not true;
end $$;

create function rota.hold_limit(key text, until timestamptz, reason text default null) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform rota.put_hold(hold_limit.key, hold_limit.until, hold_limit.reason, false);
    insert into rota.audit (action, target, reason)
    values (case when hold_limit.until > clock_timestamp() then 'hold until ' || hold_limit.until else 'release' end,
        'limit ' || hold_limit.key, rota.bounded_note(hold_limit.reason));
end $$;
comment on function rota.hold_limit is 'Let no job of a key start until an instant (NULL: end the hold). Running jobs continue.';

-- For handlers that raise rota.Hold. It never ends a hold earlier than another one asked for.
create function rota.extend_hold(key text, until timestamptz) returns void
    language sql security definer set search_path = pg_catalog, pg_temp as $$
    select rota.put_hold(extend_hold.key, extend_hold.until, 'rota.Hold', true)
$$;


-- ---------------------------------------------------------------------------------------------------- the claim

-- Claim due jobs of one node that have a key, or whose handler or queue has a limit, and the node's other jobs in turn with them.
-- sql/queries/jobs/claim_limited_jobs.sql describes the arguments and columns, docs/design.md the design.
--
-- One statement can't lock a key and count its permits: under READ COMMITTED its snapshot is older than the lock, so the count would
-- miss a claim that committed in between. So this function locks keys in one statement and counts in a later one, whose snapshot is
-- taken after the lock. Every claim that counts a key locks it first. Locks are tried and never waited for, and kept until the
-- transaction ends.
create function rota.claim_limited_jobs(
    node uuid, groups text[], slots integer[], own_queues text[], handlers text[],
    lane_queues text[], lane_handlers text[], lane_priorities smallint[], lane_floors timestamptz[],
    cursor_groups text[], cursor_priorities smallint[], cursor_queues text[], cursor_keys text[], cursor_left integer[],
    resume_priorities smallint[], resume_parts integer[], resume_queues text[], resume_keys text[],
    suspects integer, total bigint, default_lease interval, only_jobs bigint[], skipped_jobs bigint[], dry_run boolean
) returns table (
    job_id bigint, handler text, queue text, priority smallint, payload text, attempt integer, fence_token bigint,
    run_at timestamptz, started_at timestamptz, timeout interval, schedule_id bigint, scheduled_for timestamptz,
    created_at timestamptz, lease interval, idempotency_key text, meta text, checkpoint text, schedule text,
    limit_key text, is_limited boolean, turn integer, weight integer,
    next_in interval, is_contended boolean, ignored bigint[], round_complete boolean[],
    walked_priorities smallint[], walked_parts integer[], walked_queues text[], walked_keys text[]
)
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
    max_walk constant integer := 300;
    loss_level constant integer := least(suspects, 1);
    claim_at timestamptz := clock_timestamp();
    next_at timestamptz;
    contended boolean := false;
    served_handlers text[];
    -- Pairs of queue and priority with due jobs that have a key, and the lanes with due jobs that have none.
    ring_queues text[];
    ring_priorities smallint[];
    due_queues text[];
    due_handlers text[];
    due_priorities smallint[];
    due_from timestamptz[];
    -- Limits of handlers and queues: which of them this claim has locked, the permits left, the number of the last start.
    shared_keys text[] := '{}';
    shared_locked text[] := '{}';
    shared_free integer[] := '{}';
    shared_last bigint[] := '{}';
    closed_keys text[] := '{}';
    -- The open keys that the walk found, in the order of their turns. A key whose turn was interrupted has two entries.
    open_count integer := 0;
    open_groups integer[] := '{}';
    open_queues text[] := '{}';
    open_priorities smallint[] := '{}';
    open_keys text[] := '{}';
    open_handlers text[] := '{}';
    open_weights integer[] := '{}';
    open_visits_left integer[] := '{}';
    open_locked boolean[] := '{}';
    whole_round boolean[] := array_fill(false, array[cardinality(groups)]);
    walk refcursor;
    pair record;
    last_queue text;
    last_priority smallint;
    last_part integer;
    last_key text;
    has_entry boolean;
    steps integer;
    units integer;
    -- The jobs to claim.
    row_ids tid[];
    job_ids bigint[];
    job_queues text[];
    job_handlers text[];
    job_keys text[];
    job_limited boolean[];
    job_weights integer[];
    job_last bigint[];
    claimed_count bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'invalid_transaction_state',
            message = 'rota.claim_limited_jobs() needs READ COMMITTED: a single snapshot would miss what others claim';
    end if;

    update rota.jobs set state = 'limited'
    where ctid = any (array(
        select ctid from rota.jobs where state = 'waiting' and run_at <= now() order by run_at limit 1000 for update skip locked));
    next_at := (select run_at from rota.jobs where state = 'waiting' and run_at > now() order by run_at limit 1);

    -- ------------------------------------------------------------------------------------------------- where jobs are due
    served_handlers := array(
        select served.handler from unnest(handlers) as served (handler)
        where served.handler <> all (select paused.handler from rota.handlers as paused where paused.paused)
          and not exists (select from rota.queues where queue = '*' and paused));

    with recursive ring as (
        (
            select job.queue, job.losses / 2 as level, job.priority
            from rota.jobs as job
            where job.state = 'limited'
            order by job.queue, (job.losses / 2), job.priority
            limit 1
        )
        union all
        select following.queue, following.level, following.priority
        from ring
        cross join lateral (
            select job.queue, job.losses / 2 as level, job.priority
            from rota.jobs as job
            where job.state = 'limited'
              and (job.queue, (job.losses / 2), job.priority) > (ring.queue, ring.level, ring.priority)
            order by job.queue, (job.losses / 2), job.priority
            limit 1
        ) as following
    )
    select coalesce(array_agg(ring.queue), '{}'), coalesce(array_agg(ring.priority), '{}') into ring_queues, ring_priorities
    from (select queue, level, priority from ring limit 2000) as ring
    where ring.level = loss_level
      and case when ring.queue = any (own_queues) then ring.queue else '*' end = any (groups)
      and ring.queue <> all (select paused.queue from rota.queues as paused where paused.paused);

    select coalesce(array_agg(lane.queue), '{}'), coalesce(array_agg(lane.handler), '{}'),
        coalesce(array_agg(lane.priority), '{}'), coalesce(array_agg(head.run_at), '{}')
    into due_queues, due_handlers, due_priorities, due_from
    from unnest(lane_queues, lane_handlers, lane_priorities, lane_floors) as lane (queue, handler, priority, floor)
    cross join lateral (
        select job.run_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
          and (job.losses / 2) = loss_level
          and job.priority = lane.priority
          and job.run_at >= lane.floor
        order by job.run_at
        limit 1
    ) as head
    where head.run_at <= now()
      and lane.handler = any (served_handlers)
      and lane.queue <> all (select paused.queue from rota.queues as paused where paused.paused);

    -- ---------------------------------------------------------------------------------------- limits of handlers and queues
    if exists (select from rota.limits where key like 'handler:%' or key like 'queue:%')
       or exists (select from rota.limit_holds where key like 'handler:%' or key like 'queue:%') then
        select array_agg(name.key), coalesce(array_agg(name.key) filter (where lock.lock_id is not null), '{}')
        into shared_keys, shared_locked
        from (
            select 'handler:' || served.handler as key from unnest(served_handlers) as served (handler)
            union
            select 'queue:' || ring.queue from unnest(ring_queues || due_queues) as ring (queue)
        ) as name
        left join lateral (
            select locks.lock_id
            from rota.limit_locks as locks
            where locks.lock_id = (hashtextextended(name.key, 0) & 4095)
            for update skip locked
        ) as lock on true
        where exists (select from rota.limit_of(name.key)) or exists (select from rota.limit_holds as hold where hold.key = name.key);

        -- A new statement, whose snapshot has everything that the holders of the locks have claimed.
        claim_at := clock_timestamp();
        select array_agg(state.key), array_agg(state.free), array_agg(state.last_number),
            coalesce(array_agg(state.key) filter (where state.free <= 0), '{}'),
            least(next_at, min(state.reopens_at) filter (where state.free <= 0)),
            contended or coalesce(bool_or(not state.is_locked and state.reopens_at is null), false)
        into shared_keys, shared_free, shared_last, closed_keys, next_at, contended
        from (
            select shared.key, shared.key = any (shared_locked) as is_locked,
                case
                    when held.until > claim_at or shared.key <> all (shared_locked) then 0
                    else least(lim.max_running - case when lim.max_running is not null then (
                        select count(*)::integer
                        from rota.jobs as holder
                        where holder.state = 'running'
                          and shared.key in ('handler:' || holder.handler, 'queue:' || holder.queue)
                    ) end, starts.free, 1000000)
                end as free,
                starts.last_number,
                greatest(nullif(held.until, least(held.until, claim_at)), case when starts.free <= 0 then starts.reopens_at end)
                    as reopens_at
            from unnest(shared_keys) as shared (key)
            left join lateral rota.limit_of(shared.key) as lim on true
            left join rota.limit_holds as hold on hold.key = shared.key
            cross join lateral (select greatest(lim.held_until, hold.held_until) as until) as held
            left join lateral rota.starts_left(shared.key, lim.max_starts, lim.per, claim_at, 1000) as starts on true
        ) as state;
    end if;

    -- ------------------------------------------------------------------------------- walk the keys, and lock the open ones
    round_complete := array_fill(true, array[cardinality(groups)]);
    walked_priorities := array_fill(null::smallint, array[cardinality(groups)]);
    walked_parts := array_fill(null::integer, array[cardinality(groups)]);
    walked_queues := array_fill(null::text, array[cardinality(groups)]);
    walked_keys := walked_queues;
    for group_number in 1 .. cardinality(groups) loop
        -- A group in which nothing is limited is left to claim_due_jobs.
        continue when slots[group_number] <= 0 or not exists (
            select
            from (
                select ring.queue, null as handler from unnest(ring_queues) as ring (queue)
                union all
                select lane.queue, lane.handler from unnest(due_queues, due_handlers) as lane (queue, handler)
            ) as lane
            where case when lane.queue = any (own_queues) then lane.queue else '*' end = groups[group_number]
              and (lane.handler is null or 'handler:' || lane.handler = any (shared_keys) or 'queue:' || lane.queue = any (shared_keys))
        );
        round_complete[group_number] := false;
        steps := 0;
        units := 0;
        last_queue := null;
        has_entry := false;
        open walk for
            select segment.queue, segment.priority, segment.part, segment.visits_left, key_pair.limit_key, key_pair.handler,
                coalesce(lim.weight, 1) as weight, lim.max_running, lim.key is not null as is_limited, state.free,
                state.reopens_at, lock.lock_id is not null as is_locked
            from (
                -- Each ring (a queue and priority) from its cursor to the end, then from the beginning to the cursor. Before them the
                -- key whose turn was interrupted.
                select ring.queue, ring.priority, piece.part, piece.visits_left, piece.to_key,
                    case when (piece.part, ring.queue) = (resume_parts[group_number], resume_queues[group_number])
                              and ring.priority = resume_priorities[group_number]
                        then resume_keys[group_number] || E'\x01' else piece.from_key end as from_key
                from (
                    select keyed.queue, keyed.priority from unnest(ring_queues, ring_priorities) as keyed (queue, priority)
                    union
                    select lane.queue, lane.priority from unnest(due_queues, due_priorities) as lane (queue, priority)
                ) as ring
                left join unnest(cursor_groups, cursor_priorities, cursor_queues, cursor_keys, cursor_left)
                    as turn (slot_group, priority, queue, key, visits_left)
                    on turn.slot_group = groups[group_number] and turn.priority = ring.priority
                cross join lateral (
                    select 0 as part, turn.key as from_key, turn.key as to_key, turn.visits_left
                    where ring.queue = turn.queue and turn.visits_left > 0
                    union all
                    -- Keys have no control characters, so this is the first possible key after the cursor.
                    select 1, turn.key || E'\x01', null, null where ring.queue = turn.queue
                    union all
                    select 2, '', null, null where turn.queue is null or ring.queue > turn.queue
                    union all
                    select 3, '', null, null where ring.queue < turn.queue
                    union all
                    select 4, '', turn.key, null where ring.queue = turn.queue
                ) as piece
                where case when ring.queue = any (own_queues) then ring.queue else '*' end = groups[group_number]
                  and 'queue:' || ring.queue <> all (closed_keys)
                  and (resume_priorities[group_number] is null
                       or ring.priority > resume_priorities[group_number]
                       or ring.priority = resume_priorities[group_number]
                          and (piece.part, ring.queue) >= (resume_parts[group_number], resume_queues[group_number]))
                order by ring.priority, piece.part, ring.queue
            ) as segment
            cross join lateral (
                -- The jobs without a key are one key, the empty one.
                select ''::text collate "C" as limit_key, '' as handler
                where segment.from_key = ''
                  and exists (
                      select
                      from unnest(due_queues, due_handlers, due_priorities) as lane (queue, handler, priority)
                      where lane.queue = segment.queue
                        and lane.priority = segment.priority
                        and 'handler:' || lane.handler <> all (closed_keys)
                  )
                union all
                (
                    with recursive key_pair as (
                        (
                            select job.limit_key, job.handler
                            from rota.jobs as job
                            where job.state = 'limited'
                              and job.queue = segment.queue
                              and (job.losses / 2) = loss_level
                              and job.priority = segment.priority
                              and job.limit_key >= segment.from_key
                            order by job.limit_key, job.handler
                            limit 1
                        )
                        union all
                        select following.limit_key, following.handler
                        from key_pair
                        cross join lateral (
                            select job.limit_key, job.handler
                            from rota.jobs as job
                            where job.state = 'limited'
                              and job.queue = segment.queue
                              and (job.losses / 2) = loss_level
                              and job.priority = segment.priority
                              and (job.limit_key, job.handler) > (key_pair.limit_key, key_pair.handler)
                            order by job.limit_key, job.handler
                            limit 1
                        ) as following
                        where key_pair.limit_key <= segment.to_key is not false
                    )
                    select key_pair.limit_key, key_pair.handler
                    from key_pair
                    where key_pair.limit_key <= segment.to_key is not false
                )
            ) as key_pair
            left join lateral rota.limit_of(nullif(key_pair.limit_key, '')) as lim on true
            left join rota.limit_holds as hold on hold.key = key_pair.limit_key
            left join lateral rota.permits_left(key_pair.limit_key, lim.max_running) as permits on true
            left join lateral rota.starts_left(key_pair.limit_key, lim.max_starts, lim.per, claim_at, 1000) as starts on true
            cross join lateral (
                select
                    case when greatest(lim.held_until, hold.held_until) > claim_at then 0
                        else least(permits.free, starts.free) end as free,
                    case when greatest(lim.held_until, hold.held_until) > claim_at then greatest(lim.held_until, hold.held_until)
                        when starts.free <= 0 then starts.reopens_at end as reopens_at
            ) as state
            left join lateral (
                select locks.lock_id
                from rota.limit_locks as locks
                where lim.key is not null
                  and state.free > 0 is not false
                  and locks.lock_id = (hashtextextended(key_pair.limit_key, 0) & 4095)
                for update skip locked
            ) as lock on true;
        loop
            fetch walk into pair;
            if not found then
                round_complete[group_number] := true;
                whole_round[group_number] := resume_priorities[group_number] is null;
                exit;
            end if;
            if (pair.queue, pair.priority, pair.part, pair.limit_key)
                    is distinct from (last_queue, last_priority, last_part, last_key) then
                exit when units >= slots[group_number];
                if steps >= max_walk then
                    walked_priorities[group_number] := last_priority;
                    walked_parts[group_number] := last_part;
                    walked_queues[group_number] := last_queue;
                    walked_keys[group_number] := last_key;
                    exit;
                end if;
                steps := steps + 1;
                has_entry := false;
                last_queue := pair.queue;
                last_priority := pair.priority;
                last_part := pair.part;
                last_key := pair.limit_key;
                if pair.free <= 0 then
                    next_at := least(next_at, pair.reopens_at);
                elsif pair.is_limited and not pair.is_locked then
                    contended := true;
                end if;
            end if;
            continue when pair.free <= 0 or pair.is_limited and not pair.is_locked;
            continue when pair.limit_key <> ''
                and (pair.handler <> all (served_handlers) or 'handler:' || pair.handler = any (closed_keys));
            if has_entry then
                open_handlers[open_count] := open_handlers[open_count] || E'\n' || pair.handler;
                continue;
            end if;
            -- One at a time means in order, in whichever of this node's queues the key's first job is.
            continue when pair.max_running = 1 and (cardinality(ring_queues) > 1 or cardinality(closed_keys) > 0) and not coalesce((
                select (first_job.queue, first_job.priority) = (pair.queue, pair.priority)
                    and 'handler:' || first_job.handler <> all (closed_keys)
                from (
                    select ring.queue, ring.priority, served.handler, head.run_at, head.job_id
                    from unnest(ring_queues, ring_priorities) as ring (queue, priority)
                    cross join unnest(served_handlers) as served (handler)
                    cross join lateral (
                        select job.run_at, job.job_id
                        from rota.jobs as job
                        where job.state = 'limited'
                          and job.queue = ring.queue
                          and (job.losses / 2) = loss_level
                          and job.priority = ring.priority
                          and job.limit_key = pair.limit_key
                          and job.handler = served.handler
                          and (skipped_jobs is null or job.job_id <> all (skipped_jobs))
                        order by job.run_at, job.job_id
                        limit 1
                        for update skip locked
                    ) as head
                ) as first_job
                order by first_job.priority, first_job.run_at, first_job.job_id
                limit 1
            ), false);
            has_entry := true;
            open_count := open_count + 1;
            open_groups[open_count] := group_number;
            open_queues[open_count] := pair.queue;
            open_priorities[open_count] := pair.priority;
            open_keys[open_count] := pair.limit_key;
            open_handlers[open_count] := pair.handler;
            open_weights[open_count] := pair.weight;
            open_visits_left[open_count] := pair.visits_left;
            open_locked[open_count] := pair.is_locked;
            units := units + least(coalesce(pair.visits_left, pair.weight), pair.free);
        end loop;
        close walk;
    end loop;

    -- ------------------------------------------------------------------------ count the permits, and choose and lock the jobs
    -- A new statement: its snapshot has everything that other sessions claimed of the locked keys.
    claim_at := clock_timestamp();
    with entry as materialized (
        select entry.*, lim.key is not null as is_limited, starts.last_number,
            case when greatest(lim.held_until, hold.held_until) > claim_at or lim.key is not null and not entry.is_locked then 0
                else least(permits.free, starts.free) end as free
        from unnest(open_groups, open_queues, open_priorities, open_keys, open_handlers, open_weights, open_visits_left, open_locked)
            with ordinality as entry (group_number, queue, priority, key, handlers, weight, visits_left, is_locked, number)
        left join lateral rota.limit_of(nullif(entry.key, '')) as lim on true
        left join rota.limit_holds as hold on hold.key = entry.key
        left join lateral rota.permits_left(entry.key, lim.max_running) as permits on true
        left join lateral rota.starts_left(entry.key, lim.max_starts, lim.per, claim_at, 1000) as starts on true
    ),
    -- One row for each job that an entry may start. In a whole round, keys get more than one visit while slots are left.
    unit as (
        select entry.*, unit.number as unit_number, (unit.number - 1) / entry.weight as visit
        from entry
        cross join lateral (
            select least(slots[entry.group_number], entry.free,
                case when entry.visits_left is not null then entry.visits_left
                    when not whole_round[entry.group_number] then entry.weight end) as possible
        ) as bound
        cross join lateral generate_series(1, case
            when bound.possible <= entry.weight then bound.possible
            when entry.key = '' then (
                select count(*)
                from (
                    select
                    from unnest(due_queues, due_handlers, due_priorities, due_from) as lane (queue, handler, priority, floor)
                    cross join lateral (
                        select
                        from rota.jobs as job
                        where job.state = 'scheduled'
                          and job.queue = lane.queue
                          and job.handler = lane.handler
                          and (job.losses / 2) = loss_level
                          and job.priority = lane.priority
                          and job.run_at between lane.floor and now()
                        limit bound.possible
                    ) as job
                    where lane.queue = entry.queue
                      and lane.priority = entry.priority
                    limit bound.possible
                ) as due
            )
            else (
                select count(*)
                from (
                    select
                    from rota.jobs as job
                    where job.state = 'limited'
                      and job.queue = entry.queue
                      and (job.losses / 2) = loss_level
                      and job.priority = entry.priority
                      and job.limit_key = entry.key
                    limit bound.possible
                ) as due
            )
        end) as unit (number)
    ),
    fair as (
        select *, row_number() over (order by group_number, priority, visit, number, unit_number) as rank
        from (
            select *, row_number() over (partition by group_number order by priority, visit, number, unit_number) as group_rank
            from (
                select *, row_number() over (partition by key order by priority, visit, number, unit_number) as key_rank
                from unit
            ) as unit
            where key = '' or free is null or key_rank <= free
        ) as unit
        where group_rank <= slots[group_number]
    ),
    take as (
        select queue, priority, key, max(handlers) as handlers, max(weight) as weight, bool_or(is_limited) as is_limited,
            max(last_number) as last_number, count(*) as jobs, array_agg(rank order by rank) as ranks
        from fair
        group by queue, priority, key
    ),
    due as (
        select take.queue, take.key, take.weight, take.is_limited, take.last_number, take.ranks[job.number] as rank, job.*
        from take
        cross join lateral (
            (
                select keyed.row_id, keyed.job_id, keyed.handler, row_number() over (order by keyed.run_at, keyed.job_id) as number
                from unnest(string_to_array(take.handlers, E'\n')) as served (handler)
                cross join lateral (
                    select job.ctid as row_id, job.job_id, job.handler, job.run_at
                    from rota.jobs as job
                    where take.key <> ''
                      and job.state = 'limited'
                      and job.queue = take.queue
                      and (job.losses / 2) = loss_level
                      and job.priority = take.priority
                      and job.limit_key = take.key
                      and job.handler = served.handler
                      and (job.start_by is null or job.start_by > now() or job.fence_token is not null)
                      and (only_jobs is null or job.job_id = any (only_jobs))
                      and (skipped_jobs is null or job.job_id <> all (skipped_jobs))
                      and (suspects < 2 or (suspects = 2) = (
                          job.attempt + 1 >= coalesce(job.max_attempts, 20)
                          or (
                              select count(*)
                              from rota.attempts as lost
                              where lost.job_id = job.job_id
                                and lost.outcome = 'lost'
                          ) not in (0, 2)
                      ))
                    order by job.run_at, job.job_id
                    limit take.jobs
                    for update skip locked
                ) as keyed
                order by keyed.run_at, keyed.job_id
                limit take.jobs
            )
            union all
            select keyless.row_id, keyless.job_id, keyless.handler, row_number() over () as number
            from (
                select locked.row_id, locked.job_id, locked.handler
                from (
                    select lane.queue, lane.handler, lane.priority, lane.floor
                    from unnest(due_queues, due_handlers, due_priorities, due_from) as lane (queue, handler, priority, floor)
                    where take.key = ''
                      and lane.queue = take.queue
                      and lane.priority = take.priority
                      and 'handler:' || lane.handler <> all (closed_keys)
                    order by lane.floor
                ) as lane
                cross join lateral (
                    select job.ctid as row_id, job.job_id, job.handler
                    from rota.jobs as job
                    where job.state = 'scheduled'
                      and job.queue = lane.queue
                      and job.handler = lane.handler
                      and (job.losses / 2) = loss_level
                      and job.priority = lane.priority
                      and job.run_at between lane.floor and now()
                      and (job.start_by is null or job.start_by > now() or job.fence_token is not null)
                      and (only_jobs is null or job.job_id = any (only_jobs))
                      and (skipped_jobs is null or job.job_id <> all (skipped_jobs))
                      and (suspects < 2 or (suspects = 2) = (
                          job.attempt + 1 >= coalesce(job.max_attempts, 20)
                          or (
                              select count(*)
                              from rota.attempts as lost
                              where lost.job_id = job.job_id
                                and lost.outcome = 'lost'
                          ) not in (0, 2)
                      ))
                    order by job.run_at
                    limit take.jobs
                    for update skip locked
                ) as locked
                limit take.jobs
            ) as keyless
        ) as job
    ),
    -- Handlers and queues have few limits, so their permits are applied to the chosen jobs.
    permitted as (
        select *
        from (
            select due.*,
                array_position(shared_keys, 'handler:' || due.handler) as handler_limit,
                row_number() over (partition by due.handler order by due.rank) as handler_rank
            from due
        ) as due
        where due.handler_limit is null or due.handler_rank <= shared_free[due.handler_limit]
    ),
    chosen as (
        select *
        from (
            select permitted.*,
                array_position(shared_keys, 'queue:' || permitted.queue) as queue_limit,
                row_number() over (partition by permitted.queue order by permitted.rank) as queue_rank
            from permitted
        ) as permitted
        where permitted.queue_limit is null or permitted.queue_rank <= shared_free[permitted.queue_limit]
        order by permitted.rank
        limit total
    )
    select array_agg(row_id order by rank), array_agg(job_id order by rank), array_agg(queue order by rank),
        array_agg(handler order by rank), array_agg(key order by rank), array_agg(weight order by rank),
        array_agg(key <> '' or handler_limit is not null or queue_limit is not null order by rank),
        array_agg(last_number order by rank)
    into row_ids, job_ids, job_queues, job_handlers, job_keys, job_weights, job_limited, job_last
    from chosen;

    -- ------------------------------------------------------------------------------------------------------ claim the jobs
    ignored := null;
    if dry_run then
        return query select jobs.job_id, jobs.handler, jobs.queue, jobs.priority, null::text, null::integer, null::bigint,
            null::timestamptz, null::timestamptz, null::interval, jobs.schedule_id, null::timestamptz, null::timestamptz,
            null::interval, null::text, null::text, null::text, null::text, null::text, null::boolean, null::integer,
            null::integer, null::interval, null::boolean, null::bigint[], null::boolean[], null::smallint[], null::integer[],
            null::text[], null::text[]
        from rota.jobs as jobs
        where jobs.job_id = any (job_ids);
    elsif row_ids is not null then
        return query
        update rota.jobs as job
        set state = 'running',
            attempt = job.attempt + 1,
            losses = job.losses - case suspects when 3 then 1 else 0 end,
            fence_token = nextval('rota.fence_tokens'),
            leased_by = node,
            lease_expires_at = clock_timestamp() + coalesce(job.lease, default_lease),
            started_at = claim_at,
            delivery = coalesce(job.delivery, handler.delivery, 'at_least_once'),
            max_attempts = case coalesce(job.delivery, handler.delivery)
                when 'at_most_once' then 1
                else coalesce(job.max_attempts, handler.max_attempts, 20)
            end,
            backoff_base = coalesce(job.backoff_base, handler.backoff_base, interval '5 seconds'),
            backoff_cap = coalesce(job.backoff_cap, handler.backoff_cap, interval '1 hour'),
            timeout = coalesce(job.timeout, handler.timeout),
            lease = coalesce(job.lease, default_lease)
        from rota.handlers as handler
        where job.ctid = any (row_ids)
          and handler.handler = job.handler
        returning job.job_id, job.handler, job.queue, job.priority,
            case
                when pg_column_size(job.payload) <= 32768
                    and (pg_column_compression(job.payload) is null or pg_column_size(job.payload #> '{}') <= 32768)
                then job.payload::text
            end,
            job.attempt, job.fence_token,
            greatest(job.run_at, timestamptz '1000-01-01 00:00+00'), job.started_at, job.timeout, job.schedule_id,
            case when job.scheduled_for between timestamptz '1000-01-01 00:00+00' and timestamptz '8000-01-01 00:00+00'
                then nullif(job.scheduled_for, job.run_at) end,
            case when job.created_at between timestamptz '1000-01-01 00:00+00' and timestamptz '8000-01-01 00:00+00'
                then job.created_at end,
            nullif(job.lease, default_lease), job.idempotency_key, job.meta::text, job.checkpoint::text,
            case when job.schedule_id is not null then coalesce(
                (
                    select fire.name
                    from rota.fires as fire
                    where fire.scheduled_for = job.scheduled_for
                      and fire.schedule_id = job.schedule_id
                ),
                (
                    select definition.name
                    from rota.schedule_definitions as definition
                    where definition.schedule_id = job.schedule_id
                )
            ) end,
            job.limit_key::text, job_limited[array_position(job_ids, job.job_id)], array_position(job_ids, job.job_id),
            job_weights[array_position(job_ids, job.job_id)], null::interval, null::boolean, null::bigint[], null::boolean[],
            null::smallint[], null::integer[], null::text[], null::text[];
        get diagnostics claimed_count = row_count;
        if claimed_count < cardinality(job_ids) then
            ignored := array(
                select chosen.job_id
                from unnest(job_ids) as chosen (job_id)
                where not exists (
                    select
                    from rota.jobs as claimed
                    where claimed.job_id = chosen.job_id
                      and claimed.leased_by = node
                      and claimed.started_at = claim_at
                ));
        end if;
        insert into rota.limit_starts (key, number, started_at)
        select start.key, start.last_number + row_number() over (partition by start.key), claim_at
        from (
            select chosen.job_id, one.key, one.last_number
            from unnest(job_ids, job_keys, job_last, job_handlers, job_queues) as chosen (job_id, key, last_number, handler, queue)
            cross join lateral (
                values (chosen.key, chosen.last_number),
                    ('handler:' || chosen.handler, shared_last[array_position(shared_keys, 'handler:' || chosen.handler)]),
                    ('queue:' || chosen.queue, shared_last[array_position(shared_keys, 'queue:' || chosen.queue)])
            ) as one (key, last_number)
        ) as start
        where start.last_number is not null
          and start.job_id <> all (coalesce(ignored, '{}'));
    end if;
    job_id := null;
    next_in := next_at - clock_timestamp();
    is_contended := contended;
    return next;
end $$;


-- ------------------------------------------------------------------------------------------- jobs: states, keys, functions

-- ORMs send explicit NULLs, so a column's DEFAULT is not enough. The function runs for every row, and a SET clause would
-- cost too much. So it names the schema of every function and operator instead.
create or replace function rota.fill_in_job() returns trigger language plpgsql as $$
begin
    if new.queue is null then
        new.queue := coalesce(
            (select handlers.queue from rota.handlers where handlers.handler operator(pg_catalog.=) new.handler), 'default'
        );
    end if;
    new.run_at := coalesce(new.run_at, pg_catalog.now());
    new.scheduled_for := coalesce(new.scheduled_for, new.run_at);
    new.priority := coalesce(new.priority, 5);
    new.payload := coalesce(new.payload, '{}');
    if new.created_by is null then  -- a redriven job keeps its own; clients have no privilege on this column
        new.created_by := pg_catalog.current_setting('role', true);
        if new.created_by is null or new.created_by operator(pg_catalog.=) 'none' then
            new.created_by := session_user;
        end if;
    end if;
    -- The job of a schedule has the schedule's key. Not a redriven one: it keeps its own.
    if new.schedule_id is not null and new.limit_key is null and new.fence_token is null then
        new.limit_key := (
            select definition.limit_key from rota.schedule_definitions as definition
            where definition.schedule_id operator(pg_catalog.=) new.schedule_id
        );
    end if;
    if new.limit_key is not null and new.state operator(pg_catalog.=) 'scheduled' then
        new.state := case when new.run_at operator(pg_catalog.<=) pg_catalog.now() then 'limited' else 'waiting' end;
    end if;
    return new;
end $$;

create or replace trigger fill_in before insert on rota.jobs for each row
    when (num_nulls(new.queue, new.run_at, new.scheduled_for, new.priority, new.payload, new.created_by) > 0
          or num_nonnulls(new.limit_key, new.schedule_id) > 0)
    execute function rota.fill_in_job();

-- Daemons of the schema before write scheduled when they retry or release a job of a lost daemon.
create function rota.keep_limited() returns trigger language plpgsql as $$
begin
    new.state := case
        when new.limit_key is null then 'scheduled'
        when new.run_at operator(pg_catalog.<=) pg_catalog.now() then 'limited'
        else 'waiting'
    end;
    return new;
end $$;

create trigger keep_limited before update of state, run_at, limit_key on rota.jobs for each row
    when (new.state <> 'running' and (new.limit_key is not null or new.state <> 'scheduled'))
    execute function rota.keep_limited();

-- Daemons of the schema before write no limit_key into the dead letter of a job that was lost for good.
create function rota.keep_limit_key() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update rota.dead_letters set limit_key = old.limit_key where job_id = old.job_id and limit_key is null;
    return null;
end $$;

create trigger keep_limit_key after delete on rota.jobs for each row
    when (old.limit_key is not null and old.lease_expires_at < now())
    execute function rota.keep_limit_key();

-- Every end of a job deletes its row. replace_job() has checked the values by an insert that it rolled back.
create or replace function rota.insert_follow_up() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into rota.jobs (handler, unique_key, created_by, payload, queue, run_at, priority, max_attempts, backoff_base,
        backoff_cap, retry_for, timeout, lease, delivery, start_by, idempotency_key, meta, limit_key)
    select old.handler, old.unique_key, job.created_by, job.payload, job.queue, job.run_at, job.priority, job.max_attempts,
        job.backoff_base, job.backoff_cap, job.retry_for, job.timeout, job.lease, job.delivery, job.start_by,
        job.idempotency_key, job.meta, job.limit_key
    from jsonb_to_record(old.follow_up) as job (
        created_by text, payload jsonb, queue text, run_at timestamptz, priority smallint, max_attempts integer,
        backoff_base interval, backoff_cap interval, retry_for interval, timeout interval, lease interval, delivery text,
        start_by timestamptz, idempotency_key text, meta jsonb, limit_key text
    );
    return null;
end $$;

-- A single statement with a single snapshot: between two statements a job could move to another table and be found in neither.
create or replace function rota.state_of(job_id bigint) returns text
    language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(
        (select case state when 'running' then 'running' else 'scheduled' end from rota.jobs where jobs.job_id = state_of.job_id),
        (select 'dead' from rota.dead_letters where dead_letters.job_id = state_of.job_id),
        (select outcome from rota.job_runs where job_runs.job_id = state_of.job_id limit 1))
$$;

-- A new argument makes a new function. The old one must go, because a call without the argument would match both.
drop function rota.enqueue(text, jsonb, text, timestamptz, integer, text, text, integer, interval, interval, interval, interval, interval,
    text, timestamptz, text, jsonb);
drop function rota.put_job(text, jsonb, text, timestamptz, integer, text, text, integer, interval, interval, interval, interval, interval,
    text, timestamptz, text, jsonb);
drop function rota.replace_job(bigint, jsonb, text, timestamptz, integer, integer, interval, interval, interval, interval, interval, text,
    timestamptz, text, jsonb, boolean);

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
    start_by timestamptz, idempotency_key text, meta jsonb, queue_one boolean, limit_key text default null
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
        meta = replace_job.meta,
        limit_key = replace_job.limit_key
    where job_id = replace_job.job_id and state <> 'running' and fence_token is null;
    if found then
        return 'rewritten';
    end if;

    with deleted_job as (
        delete from rota.jobs
        where job_id = replace_job.job_id and state <> 'running'
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
                timeout, lease, delivery, start_by, idempotency_key, meta, limit_key)
            values (job_handler, replace_job.payload, replace_job.queue, replace_job.run_at, replace_job.priority,
                replace_job.max_attempts, replace_job.backoff_base, replace_job.backoff_cap, replace_job.retry_for,
                replace_job.timeout, replace_job.lease, replace_job.delivery, replace_job.start_by,
                replace_job.idempotency_key, replace_job.meta, replace_job.limit_key);
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
            'idempotency_key', replace_job.idempotency_key, 'limit_key', replace_job.limit_key
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
    meta jsonb default null,
    limit_key text default null
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
            retry_for, timeout, lease, delivery, start_by, idempotency_key, meta, limit_key)
        values (put_job.handler, put_job.payload, put_job.queue, put_job.run_at, put_job.priority, put_job.unique_key,
            put_job.max_attempts, put_job.backoff_base, put_job.backoff_cap, put_job.retry_for, put_job.timeout,
            put_job.lease, put_job.delivery, put_job.start_by, put_job.idempotency_key, put_job.meta, put_job.limit_key)
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
                put_job.on_conflict = 'queue_one', put_job.limit_key);
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
    meta jsonb default null,
    limit_key text default null
) returns table (job_id bigint, created boolean)
    language sql set search_path = pg_catalog, pg_temp as $$
    select put.job_id, put.created
    from rota.put_job(
        enqueue.handler, enqueue.payload, enqueue.queue, enqueue.run_at, enqueue.priority, enqueue.unique_key,
        enqueue.on_conflict, enqueue.max_attempts, enqueue.backoff_base, enqueue.backoff_cap, enqueue.retry_for,
        enqueue.timeout, enqueue.lease, enqueue.delivery, enqueue.start_by, enqueue.idempotency_key, enqueue.meta,
        enqueue.limit_key) as put
$$;
comment on function rota.enqueue is
    'Insert a job with the rights of the caller. If a live job of the handler has the unique_key, keep returns that job, replace '
    'rewrites it unless it is running, queue_one also runs the new values after a running job, and error raises RT005.';

-- Returns 'cancelled' (the job is in the ledger), 'requested' (it is running or locked, and its daemon is notified), or 'finished' (it
-- had ended before, or is a dead letter). Does not wait for locks on jobs.
create or replace function rota.cancel(job_id bigint, force boolean default null, note text default null) returns text
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
            where job_id = cancel.job_id and (state <> 'running' or is_forced)
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

-- Cancels waiting jobs, oldest first, and asks running jobs to stop. Skips locked rows. Call again until both numbers are 0.
create or replace function rota.cancel_many(
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
        where state <> 'running'
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

-- Returns the instant as stored. scheduled_for, and with it the idempotency key, does not change.
create or replace function rota.reschedule(job_id bigint, run_at timestamptz default null, note text default null) returns timestamptz
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
        where job_id = reschedule.job_id and state <> 'running'
        returning run_at into new_run_at;
        if found then
            if rota.is_operator() then
                insert into rota.audit (action, target, reason) values ('reschedule', 'job ' || reschedule.job_id, reason_text);
            end if;
            return new_run_at;
        end if;
    end loop;
end $$;

-- Skips locked rows.
create or replace function rota.retry_now(
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
        where state <> 'running' and attempt > 0 and run_at > now()
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

-- Make dead letters live jobs again, and return the ids of those that were redriven. A letter is not redriven if a live job has its
-- unique_key or its exclusive schedule. For redrive() and redrive_many().
create or replace function rota.send_back(job_ids bigint[], payload jsonb, spread interval) returns bigint[]
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
            backoff_cap, timeout, lease, unique_key, idempotency_key, meta, checkpoint, limit_key
        from rota.dead_letters
        where job_id = any (send_back.job_ids)
        order by job_id
        for update
    ), sent_jobs as (
        -- fence_token is copied, because it shows that the job has been claimed before.
        insert into rota.jobs (job_id, run_at, scheduled_for, created_at, fence_token, schedule_id, max_attempts,
            priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, timeout, lease,
            unique_key, idempotency_key, meta, checkpoint, limit_key)
        overriding system value
        select job_id,
            now() + coalesce(send_back.spread, interval '0')
                    * ((row_number() over (order by job_id) - 1)::double precision / count(*) over ()),
            scheduled_for, created_at, fence_token, schedule_id, max_attempts,
            priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, timeout, lease,
            unique_key, idempotency_key, meta, checkpoint, limit_key
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

-- These four functions return whether the call changed anything. A pause keeps jobs from being claimed; running jobs continue.
create or replace function rota.pause_queue(name text, reason text default null) returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    reason_text text := rota.bounded_note(pause_queue.reason);
begin
    perform rota.refuse_bad_name(pause_queue.name);
    if pause_queue.name not in ('*', 'default')
       and not exists (select from rota.nodes where pause_queue.name = any (queues))
       and not exists (select from rota.handlers where queue = pause_queue.name)
       and not exists (select from rota.jobs where queue = pause_queue.name and state <> 'running') then
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


-- ----------------------------------------------------------------------------------------------------- schedules and views

create or replace view rota.schedules as
select schedule_id, name, cron, every, timezone,
    handler, payload, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery,
    start_within, meta,
    start_at, end_at, paused, resume_at, misfire, on_time_within, too_late_after, catch_up_limit, overlap, dst_gap, dst_fold,
    jitter,
    description, owner, declared_by, declared, expect_success_within,
    created_at, created_by, edited_at, paused_at,
    (select nullif(next_fire_at, '-infinity') from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as next_fire_at,
    (select last_fire_at from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as last_fire_at,
    (select last_success_at from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as last_success_at,
    (select consecutive_failures from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as consecutive_failures,
    nullif(coalesce((select coalesce(invalid_reason, '') from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id), 'its row in rota.schedule_clocks is missing'), '') as invalid_reason,
    (select version from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id) as version,
    coalesce((select case
         when invalid_reason is not null then 'invalid'
         when paused then 'paused'
         when next_fire_at is null then 'ended'
         -- -infinity means to be computed, which daemons should do right after the edit.
         when coalesce(nullif(next_fire_at, '-infinity'), edited_at) < now() - interval '30 seconds' then 'overdue'
         else 'ok' end
     from rota.schedule_clocks as clock
     where clock.schedule_id = definition.schedule_id), 'invalid') as state,
    limit_key
from rota.schedule_definitions as definition;

drop function rota.put_schedule(text, text, text, interval, text, jsonb, text, integer, integer, interval, interval, interval,
    interval, interval, text, interval, jsonb, timestamptz, timestamptz, boolean, timestamptz, text, interval, interval, integer,
    text, text, text, interval, interval, text, text);

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
    owner text default null,
    limit_key text default null
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
        expect_success_within, description, owner, limit_key)
    values (put_schedule.name, put_schedule.handler, put_schedule.cron, put_schedule.every, put_schedule.timezone,
        put_schedule.payload, put_schedule.queue, put_schedule.priority, put_schedule.max_attempts,
        put_schedule.backoff_base, put_schedule.backoff_cap, put_schedule.retry_for, put_schedule.timeout,
        put_schedule.lease, put_schedule.delivery, put_schedule.start_within, put_schedule.meta, put_schedule.start_at,
        put_schedule.end_at, put_schedule.paused, put_schedule.resume_at, put_schedule.misfire,
        put_schedule.on_time_within, put_schedule.too_late_after, put_schedule.catch_up_limit, put_schedule.overlap,
        put_schedule.dst_gap, put_schedule.dst_fold, put_schedule.jitter, put_schedule.expect_success_within,
        put_schedule.description, put_schedule.owner, put_schedule.limit_key)
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
        owner = excluded.owner, limit_key = excluded.limit_key,
        paused = coalesce(put_schedule.paused, existing.paused),
        resume_at = coalesce(put_schedule.resume_at, existing.resume_at)
    returning schedule_id into stored_id;
    return stored_id;
end $$;
comment on function rota.put_schedule is
    'Insert a schedule, or set all values of the schedule with that name (NULL: the default; paused and resume_at: unchanged).';

create or replace view rota.job_status as
select job_id, handler, queue,
    case when state = 'running' then 'running'
         when run_at <= now() then case
             when exists (select from rota.limits where key = limit_key)
                  or exists (select from rota.limits where right(key, 1) = '*' and starts_with(limit_key, left(key, -1)))
                  or exists (select from rota.limits where key in ('handler:' || handler, 'queue:' || queue))
                  or exists (
                      select from rota.limits
                      where right(key, 1) = '*'
                        and (starts_with(key, 'handler:') and starts_with('handler:' || handler, left(key, -1))
                             or starts_with(key, 'queue:') and starts_with('queue:' || queue, left(key, -1)))
                  )
                  or exists (
                      select from rota.limit_holds
                      where key in (limit_key, 'handler:' || handler, 'queue:' || queue) and held_until > now()
                  )
             then 'limited' else 'due' end
         when attempt > 0 then 'retrying'
         else 'future' end as state,
    priority, run_at, scheduled_for, attempt, max_attempts, unique_key, schedule_id, created_at, created_by, started_at,
    null::timestamptz as finished_at, leased_by as node, fence_token, lease_expires_at,
    exists (select from rota.cancel_requests where cancel_requests.job_id = jobs.job_id) as cancel_requested,
    (select attempts.error_kind from rota.attempts where attempts.job_id = jobs.job_id
     order by attempts.fence_token desc limit 1) as last_error_kind,
    progress, progress_note, meta, null::jsonb as result, null::text as note, limit_key
from rota.jobs
union all
select job_id, handler, queue, 'dead', priority, run_at, scheduled_for, attempt, max_attempts, unique_key, schedule_id,
    created_at, created_by, started_at, finished_at, node, fence_token, null, false, error_kind, progress, progress_note, meta,
    null, reason, limit_key
from rota.dead_letters
union all
select job_id, handler, queue, outcome, null, null, scheduled_for, attempts, null, unique_key, schedule_id,
    null, null, started_at, finished_at, node, fence_token, null, false,
    (select attempts.error_kind from rota.attempts where attempts.job_id = job_runs.job_id
     order by attempts.fence_token desc limit 1),
    null, null, meta, result, note, null
from rota.job_runs;
comment on view rota.job_status is
    'Every job, live or ended. state: future, due, limited (due, and a limit applies), retrying, running, succeeded, dead, discarded, cancelled or expired.';

revoke all on function rota.limit_of, rota.starts_left, rota.permits_left, rota.check_limit, rota.tell_of_limits, rota.audit_limit,
    rota.set_limit, rota.remove_limit, rota.put_hold, rota.hold_limit, rota.extend_hold, rota.claim_limited_jobs, rota.keep_limited,
    rota.keep_limit_key, rota.replace_job, rota.put_job, rota.enqueue, rota.put_schedule from public;
