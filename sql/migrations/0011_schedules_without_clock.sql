-- A schedule whose clock is missing never fires: the owner disabled a trigger, or deleted the row. Show it as invalid.
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
     where clock.schedule_id = definition.schedule_id), 'invalid') as state
from rota.schedule_definitions as definition;
