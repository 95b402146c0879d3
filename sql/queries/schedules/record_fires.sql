-- Store decisions about schedules: update the schedule's clock, enqueue jobs, and record the fires.
-- A decision is stored only if the schedule is still as it was when it was read ($2, $4). Otherwise another node was faster.
-- Schedules whose row another transaction has locked are skipped.
--   $1 schedule_ids    int8[]         in ascending order
--   $2 versions        int8[]         version of each schedule when it was read
--   $3 decisions       int4[]         index (from 1) into $4 to $8 of the decision for this schedule
--   $4 expected        timestamptz[]  next_fire_at when it was read (-infinity: not planned yet)
--   $5 next_fire_at    timestamptz[]  next instant (infinity: none)
--   $6 decided_up_to   timestamptz[]  last instant decided (-infinity: none)
--   $7 first_fires     int4[]         index (from 1) into $9 to $13 of the decision's first fire
--   $8 last_fires      int4[]         index of its last fire (smaller than the first: no fires)
--   $9 scheduled_for   timestamptz[]  instant of each fire; for a stretch of missed instants, the last one
--   $10 plans          text[]         a disposition, or one of the four words explained below
--   $11 missed_from    timestamptz[]  first instant of a stretch of missed instants (-infinity: the fire is one instant)
--   $12 missed_count   int4[]         number of instants in the stretch (0: null)
--   $13 notes          text[]
--   -> decided int8, disposition text?, scheduled_for timestamptz?, fires int8?, lateness interval?
--   enqueue            enqueued if the schedule has no live job and no waiting fire, or allows overlap; else waiting or
--                      skipped_overlap, as its overlap says
--   wait_behind_first  (overlap queue_one only) waiting if this statement enqueues an earlier fire of the same schedule, else
--                      skipped_overlap
--   enqueue_or_wait    enqueued if the schedule has no live job and no waiting fire, else waiting, whatever its overlap
--   wait               waiting
-- Always returns at least one row. `decided` counts the schedules whose decision was stored; the others were locked, or had changed
-- since they were read.
-- index: schedule_clocks_pkey, schedule_definitions_pkey, promote_waiting_fires_idx (0005), jobs_exclusive_idx (0002)
-- Schedules with the same decision share one entry in $4 to $8. With one entry per schedule, building the arrays cost the client
-- as much as all its other work for a fire.
-- Do not join the arrays with each other: the planner underestimates their length and picks slow joins (4.7 s at 100,000 fires).
-- Instead, look up a clock's values with width_bucket() in the sorted $1, and test membership with hashed subplans. `is true`
-- keeps the planner from turning these into joins.
-- The unique index decides whether the schedule already has a live job. `live_jobs` is only a shortcut: without it, the insert would
-- wait for any transaction that has such a job locked. It shows the state at the start of the statement.
with locked_clocks as materialized (
    select clock.row_id
    from unnest($1::int8[], $2::int8[], $3::int4[]) as input (schedule_id, version, decision)
    cross join lateral (
        select clocks.ctid as row_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = input.schedule_id
          and clocks.version is not distinct from input.version
          and clocks.next_fire_at is not distinct from ($4::timestamptz[])[input.decision]
        for update skip locked
    ) as clock
),
decided_clocks as (
    update rota.schedule_clocks as clock
    set next_fire_at = nullif(
            ($5::timestamptz[])[($3::int4[])[width_bucket(clock.schedule_id, $1::int8[])]], timestamptz 'infinity'
        ),
        last_fire_at = greatest(
            clock.last_fire_at,
            nullif(($6::timestamptz[])[($3::int4[])[width_bucket(clock.schedule_id, $1::int8[])]], timestamptz '-infinity')
        ),
        paused_from = null
    where clock.ctid = any (array(select locked_clocks.row_id from locked_clocks))
    returning clock.schedule_id
),
live_jobs as materialized (
    select job.schedule_id
    from rota.jobs as job
    where job.exclusive
      and job.schedule_id = any ($1::int8[])
),
schedules_with_waiting_fire as materialized (
    select fire.schedule_id
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and fire.schedule_id = any ($1::int8[])
),
fire as materialized (
    select
        input.schedule_id, planned.scheduled_for, planned.plan, planned.missed_from, planned.missed_count, planned.note,
        definition.name, definition.overlap, definition.start_within, definition.created_by, definition.handler,
        definition.payload, definition.priority, definition.max_attempts, definition.backoff_base,
        definition.backoff_cap, definition.retry_for, definition.timeout, definition.lease, definition.delivery,
        definition.meta,
        -- The trigger of rota.jobs would set the same default, but with one query per row.
        coalesce(
            definition.queue,
            (select handlers.queue from rota.handlers where handlers.handler = definition.handler),
            'default'
        ) as queue,
        planned.scheduled_for + case
            when definition.jitter = interval '0' then interval '0'
            else rota.jitter_offset(input.schedule_id, definition.jitter)
        end as run_at,
        case
            when planned.plan in ('enqueue', 'enqueue_or_wait')
                and (
                    definition.overlap = 'allow'
                    or input.schedule_id not in (select live_jobs.schedule_id from live_jobs)
                    and input.schedule_id not in (select schedules_with_waiting_fire.schedule_id from schedules_with_waiting_fire)
                )
            then nextval('rota.jobs_job_id_seq')
        end as job_id
    from unnest($1::int8[], $3::int4[]) as input (schedule_id, decision)
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = input.schedule_id
        offset 0
    ) as definition
    cross join lateral (
        select
            ($9::timestamptz[])[fire] as scheduled_for,
            ($10::text[])[fire] as plan,
            nullif(($11::timestamptz[])[fire], timestamptz '-infinity') as missed_from,
            nullif(($12::int4[])[fire], 0) as missed_count,
            ($13::text[])[fire] as note
        from generate_series(($7::int4[])[input.decision], ($8::int4[])[input.decision]) as fire
        offset 0
    ) as planned
    where (input.schedule_id in (select decided_clocks.schedule_id from decided_clocks)) is true
),
enqueued_jobs as (
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
outcome as materialized (
    select
        fire.schedule_id, fire.scheduled_for, fire.name, fire.missed_from, fire.missed_count, fire.note,
        fire.plan = 'enqueue' and fire.overlap = 'replace' as replaces,
        case when fire.job_id in (select enqueued_jobs.job_id from enqueued_jobs) then fire.job_id end as job_id,
        case
            when fire.plan not in ('enqueue', 'wait_behind_first', 'enqueue_or_wait', 'wait') then fire.plan
            when fire.job_id in (select enqueued_jobs.job_id from enqueued_jobs) then 'enqueued'
            when fire.plan in ('enqueue_or_wait', 'wait') then 'waiting'
            when fire.plan = 'wait_behind_first'
                and fire.schedule_id in (select enqueued_jobs.schedule_id from enqueued_jobs)
            then 'waiting'
            when fire.plan = 'enqueue' and fire.overlap = 'replace' then 'waiting'
            when fire.plan = 'enqueue' and fire.overlap = 'queue_one'
                and fire.schedule_id not in (select schedules_with_waiting_fire.schedule_id from schedules_with_waiting_fire)
            then 'waiting'
            else 'skipped_overlap'
        end as disposition
    from fire
),
replaced_fires as (
    update rota.fires as older
    set disposition = 'replaced',
        decided_at = clock_timestamp()
    where older.disposition = 'waiting'
      and older.schedule_id = any (array(
          select outcome.schedule_id from outcome where outcome.disposition = 'waiting' and outcome.replaces
      ))
    returning older.scheduled_for, older.schedule_id
),
recorded_fires as (
    insert into rota.fires (
        scheduled_for, schedule_id, name, disposition, job_id, missed_from, missed_count, note, replaces
    )
    select outcome.scheduled_for, outcome.schedule_id, outcome.name, outcome.disposition, outcome.job_id, outcome.missed_from,
        outcome.missed_count, outcome.note, case when outcome.disposition = 'waiting' and outcome.replaces then true end
    from outcome
    on conflict do nothing
)
select
    (select count(*) from decided_clocks) as decided, summary.disposition, summary.scheduled_for, summary.fires, summary.lateness
from (select) as one_row
left join (
    select outcome.disposition, outcome.scheduled_for, count(*) as fires, clock_timestamp() - outcome.scheduled_for as lateness
    from outcome
    group by outcome.disposition, outcome.scheduled_for
    union all
    select 'replaced', replaced_fires.scheduled_for, count(*), clock_timestamp() - replaced_fires.scheduled_for
    from replaced_fires
    group by replaced_fires.scheduled_for
) as summary on true
