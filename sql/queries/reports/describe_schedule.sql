-- Return all columns of one schedule.
--   $1 name  text
--   -> schedule_id int8?, name text?, cron text?, every interval?, timezone text?, handler text?, payload text?, queue text?, priority int2?, max_attempts int4?, backoff_base interval?, backoff_cap interval?, retry_for interval?, timeout interval?, lease interval?, delivery text?, start_within interval?, meta text?, start_at timestamptz?, end_at timestamptz?, paused bool?, resume_at timestamptz?, misfire text?, on_time_within interval?, too_late_after interval?, catch_up_limit int4?, overlap text?, dst_gap text?, dst_fold text?, jitter interval?, description text?, owner text?, declared_by text?, declared text?, expect_success_within interval?, limit_key text?, created_at timestamptz?, created_by text?, edited_at timestamptz?, paused_at timestamptz?, next_fire_at timestamptz?, last_fire_at timestamptz?, last_success_at timestamptz?, consecutive_failures int4?, invalid_reason text?, state text?, silent bool?, jitter_offset interval?, now timestamptz?
select
    schedule.schedule_id, schedule.name, schedule.cron, schedule.every, schedule.timezone, schedule.handler,
    schedule.payload::text as payload, schedule.queue, schedule.priority, schedule.max_attempts, schedule.backoff_base,
    schedule.backoff_cap, schedule.retry_for, schedule.timeout, schedule.lease, schedule.delivery,
    schedule.start_within, schedule.meta::text as meta, schedule.start_at, schedule.end_at, schedule.paused,
    schedule.resume_at, schedule.misfire, schedule.on_time_within, schedule.too_late_after, schedule.catch_up_limit,
    schedule.overlap, schedule.dst_gap, schedule.dst_fold, schedule.jitter, schedule.description, schedule.owner,
    schedule.declared_by, schedule.declared::text as declared, schedule.expect_success_within, schedule.limit_key,
    schedule.created_at, schedule.created_by, schedule.edited_at, schedule.paused_at, schedule.next_fire_at, schedule.last_fire_at,
    schedule.last_success_at, schedule.consecutive_failures, schedule.invalid_reason, schedule.state,
    not schedule.paused
        and extract(epoch from coalesce(schedule.last_success_at, schedule.created_at)) + extract(epoch from schedule.expect_success_within)
            < extract(epoch from now()) as silent,
    rota.jitter_offset(schedule.schedule_id, schedule.jitter) as jitter_offset,
    now() as now
from rota.schedules as schedule
where schedule.name = $1
