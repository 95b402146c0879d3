-- Enqueue waiting fires: the oldest one of each schedule that has no live job.
-- The number of waiting fires is never cached. Each call reads fires and live jobs again.
-- Schedules whose row another transaction has locked are skipped.
--   $1 limit  int8
--   $2 only   int8[]  only these schedule_ids; null: all
--   -> promoted int8?, waiting int8?
--   promoted  fires enqueued
--   waiting   schedules looked at that still have a waiting fire
-- index: promote_waiting_fires_idx, fires_pkey, schedule_clocks_pkey, schedule_definitions_pkey (0005), jobs_exclusive_idx (0002)
-- The unique index jobs_exclusive_idx decides whether the schedule already has a live job. `live_jobs` is only a shortcut.
-- Lock the schedule_clocks row, as a redrive does. Without this, the insert could wait for a redrive's transaction, and the whole
-- batch with it.
with waiting_fires as materialized (
    select distinct on (fire.schedule_id) fire.schedule_id, fire.scheduled_for
    from rota.fires as fire
    where fire.disposition = 'waiting'
      and ($2::int8[] is null or fire.schedule_id = any ($2))
    order by fire.schedule_id, fire.scheduled_for
    limit $1
),
live_jobs as materialized (
    select job.schedule_id
    from rota.jobs as job
    where job.exclusive
      and job.schedule_id = any (array(select waiting_fires.schedule_id from waiting_fires))
),
locked_fires as materialized (
    select waiting_fires.schedule_id, waiting_fires.scheduled_for, fire.row_id, nextval('rota.jobs_job_id_seq') as job_id
    from waiting_fires
    cross join lateral (
        select fires.ctid as row_id
        from rota.fires
        where fires.scheduled_for = waiting_fires.scheduled_for
          and fires.schedule_id = waiting_fires.schedule_id
          and fires.disposition is not distinct from 'waiting'
        for update skip locked
    ) as fire
    cross join lateral (
        select clocks.schedule_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = waiting_fires.schedule_id
        for update skip locked
    ) as clock
    where (waiting_fires.schedule_id not in (select live_jobs.schedule_id from live_jobs)) is true
),
enqueued_jobs as (
    insert into rota.jobs (
        job_id, schedule_id, scheduled_for, run_at, start_by, exclusive, created_by, handler, payload, queue, priority,
        max_attempts, backoff_base, backoff_cap, retry_for, timeout, lease, delivery, meta
    )
    overriding system value
    select
        locked_fires.job_id, locked_fires.schedule_id, locked_fires.scheduled_for, now(), now() + definition.start_within,
        true, definition.created_by, definition.handler, definition.payload, definition.queue, definition.priority,
        definition.max_attempts, definition.backoff_base, definition.backoff_cap, definition.retry_for, definition.timeout,
        definition.lease, definition.delivery, definition.meta
    from locked_fires
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = locked_fires.schedule_id
        offset 0
    ) as definition
    on conflict (schedule_id) where exclusive do nothing
    returning job_id, schedule_id
),
promoted_fires as (
    update rota.fires as fire
    set disposition = 'enqueued',
        job_id = (select enqueued_jobs.job_id from enqueued_jobs where enqueued_jobs.schedule_id = fire.schedule_id),
        decided_at = clock_timestamp()
    where fire.ctid = any (array(select locked_fires.row_id from locked_fires))
      and (fire.schedule_id in (select enqueued_jobs.schedule_id from enqueued_jobs)) is true
    returning fire.schedule_id
)
select
    (select count(*) from promoted_fires) as promoted,
    (select count(*) from waiting_fires) - (select count(*) from promoted_fires) as waiting
