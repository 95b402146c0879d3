-- Write what was decided about schedules, where it still holds: the clock, the jobs of the fires, and the fires themselves.
--   $1 schedule_ids    int8[]         in ascending order
--   $2 versions        int8[]         what was read of each, and …
--   $3 decisions       int4[]         … which of the decisions below, counted from 1, is about it
--   $4 expected        timestamptz[]  its next_fire_at when it was read (-infinity: it was to be planned)
--   $5 next_fire_at    timestamptz[]  the next instant (infinity: there is none)
--   $6 decided_up_to   timestamptz[]  the last instant decided (-infinity: none)
--   $7 first_fires     int4[]         where in the lists below the fires of this decision begin, counted from 1 …
--   $8 last_fires      int4[]         … and end (before they begin: there are none)
--   $9 scheduled_for   timestamptz[]
--   $10 plans          text[]         a disposition, or one of the four words explained below
--   $11 missed_from    timestamptz[]  -infinity: it stands for one instant
--   $12 missed_count   int4[]         0: null
--   $13 notes          text[]
--   -> decided int8, disposition text?, scheduled_for timestamptz?, fires int8?, lateness interval?
--   enqueue            enqueued if the schedule has no live job and no waiting fire, or allows overlap; else waiting or
--                      skipped_overlap, as its overlap says
--   wait_behind_first  (overlap queue_one only) waiting if this statement enqueues an earlier fire of the same schedule, else
--                      skipped_overlap
--   enqueue_or_wait    enqueued if the schedule has no live job and no waiting fire, else waiting, whatever its overlap
--   wait               waiting
-- At least one row comes back, for decided, the number of schedules about which nobody else has decided meanwhile.
-- index: schedule_clocks_pkey, schedule_definitions_pkey, promote_waiting_fires_idx (0005), jobs_exclusive_idx (0002)
-- A decision is sent once for all schedules that are alike: written out for each, the lists cost the sender as much as all
-- else that it does for a fire.
-- No joins of one list with another, which the planner takes for short ones: at 100,000 fires they took 4.7 s. A clock's
-- new values are found by bisection of $1, definitions by their index, the rest by hashed subplans ("is true" keeps the
-- planner from making joins of them).
-- Whether a job of the schedule is live, the unique index decides. `live` only spares a wait for whoever holds such a job
-- locked in a transaction of their own: what can be seen here was live at this statement's beginning.
with held as materialized (
    select clock.row_id
    from unnest($1::int8[], $2::int8[], $3::int4[]) as given (schedule_id, version, decision)
    cross join lateral (
        select clocks.ctid as row_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = given.schedule_id
          and clocks.version is not distinct from given.version
          and clocks.next_fire_at is not distinct from ($4::timestamptz[])[given.decision]
        for update skip locked
    ) as clock
),
decided as (
    update rota.schedule_clocks as clock
    set next_fire_at = nullif(
            ($5::timestamptz[])[($3::int4[])[width_bucket(clock.schedule_id, $1::int8[])]], timestamptz 'infinity'
        ),
        last_fire_at = greatest(
            clock.last_fire_at,
            nullif(($6::timestamptz[])[($3::int4[])[width_bucket(clock.schedule_id, $1::int8[])]], timestamptz '-infinity')
        ),
        paused_from = null
    where clock.ctid = any (array(select held.row_id from held))
    returning clock.schedule_id
),
live as materialized (
    select job.schedule_id
    from rota.jobs as job
    where job.exclusive
      and job.schedule_id = any ($1::int8[])
),
queued as materialized (
    select fire.schedule_id
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and fire.schedule_id = any ($1::int8[])
),
fire as materialized (
    select
        given.schedule_id, tried.scheduled_for, tried.plan, tried.missed_from, tried.missed_count, tried.note,
        definition.name, definition.overlap, definition.start_within, definition.created_by, definition.handler,
        definition.payload, definition.priority, definition.max_attempts, definition.backoff_base,
        definition.backoff_cap, definition.retry_for, definition.timeout, definition.lease, definition.delivery,
        definition.meta,
        -- The trigger of rota.jobs would do the same, by a query of its own for each row.
        coalesce(
            definition.queue,
            (select handlers.queue from rota.handlers where handlers.handler = definition.handler),
            'default'
        ) as queue,
        tried.scheduled_for + case
            when definition.jitter = interval '0' then interval '0'
            else rota.jitter_offset(given.schedule_id, definition.jitter)
        end as run_at,
        case
            when tried.plan in ('enqueue', 'enqueue_or_wait')
                and (
                    definition.overlap = 'allow'
                    or given.schedule_id not in (select live.schedule_id from live)
                    and given.schedule_id not in (select queued.schedule_id from queued)
                )
            then nextval('rota.jobs_job_id_seq')
        end as job_id
    from unnest($1::int8[], $3::int4[]) as given (schedule_id, decision)
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = given.schedule_id
        offset 0
    ) as definition
    cross join lateral (
        select
            ($9::timestamptz[])[fire] as scheduled_for,
            ($10::text[])[fire] as plan,
            nullif(($11::timestamptz[])[fire], timestamptz '-infinity') as missed_from,
            nullif(($12::int4[])[fire], 0) as missed_count,
            ($13::text[])[fire] as note
        from generate_series(($7::int4[])[given.decision], ($8::int4[])[given.decision]) as fire
        offset 0
    ) as tried
    where (given.schedule_id in (select decided.schedule_id from decided)) is true
),
enqueued as (
    insert into rota.jobs (
        job_id, schedule_id, scheduled_for, run_at, start_by, exclusive, created_by, handler, payload, queue, priority,
        max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta
    )
    overriding system value
    select
        fire.job_id, fire.schedule_id, fire.scheduled_for, fire.run_at,
        case when fire.start_within is not null then greatest(fire.run_at, now()) + fire.start_within end,
        fire.overlap <> 'allow', fire.created_by, fire.handler, fire.payload, fire.queue, fire.priority,
        fire.max_attempts, fire.backoff_base, fire.backoff_cap, fire.retry_for, fire.timeout, fire.lease, fire.delivery,
        fire.meta
    from fire
    where fire.job_id is not null
    on conflict (schedule_id) where exclusive do nothing
    returning job_id, schedule_id
),
ruled as materialized (
    select
        fire.schedule_id, fire.scheduled_for, fire.name, fire.missed_from, fire.missed_count, fire.note,
        fire.plan = 'enqueue' and fire.overlap = 'replace' as replaces,
        case when fire.job_id in (select enqueued.job_id from enqueued) then fire.job_id end as job_id,
        case
            when fire.plan not in ('enqueue', 'wait_behind_first', 'enqueue_or_wait', 'wait') then fire.plan
            when fire.job_id in (select enqueued.job_id from enqueued) then 'enqueued'
            when fire.plan in ('enqueue_or_wait', 'wait') then 'waiting'
            when fire.plan = 'wait_behind_first'
                and fire.schedule_id in (select enqueued.schedule_id from enqueued)
            then 'waiting'
            when fire.plan = 'enqueue' and fire.overlap = 'replace' then 'waiting'
            when fire.plan = 'enqueue' and fire.overlap = 'queue_one'
                and fire.schedule_id not in (select queued.schedule_id from queued)
            then 'waiting'
            else 'skipped_overlap'
        end as disposition
    from fire
),
replaced as (
    update rota.fires as older
    set disposition = 'replaced',
        decided_at = clock_timestamp()
    where older.disposition = 'waiting'
      and older.schedule_id = any (array(
          select ruled.schedule_id from ruled where ruled.disposition = 'waiting' and ruled.replaces
      ))
    returning older.scheduled_for, older.schedule_id
),
recorded as (
    insert into rota.fires (
        scheduled_for, schedule_id, name, disposition, job_id, missed_from, missed_count, note, replaces
    )
    select ruled.scheduled_for, ruled.schedule_id, ruled.name, ruled.disposition, ruled.job_id, ruled.missed_from,
        ruled.missed_count, ruled.note, case when ruled.disposition = 'waiting' and ruled.replaces then true end
    from ruled
    on conflict do nothing
)
select
    (select count(*) from decided) as decided, told.disposition, told.scheduled_for, told.fires, told.lateness
from (select) as always
left join (
    select ruled.disposition, ruled.scheduled_for, count(*) as fires, clock_timestamp() - ruled.scheduled_for as lateness
    from ruled
    group by ruled.disposition, ruled.scheduled_for
    union all
    select 'replaced', replaced.scheduled_for, count(*), clock_timestamp() - replaced.scheduled_for
    from replaced
    group by replaced.scheduled_for
) as told on true
