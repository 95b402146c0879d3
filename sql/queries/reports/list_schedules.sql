-- List schedules by name.
--   $1 handler    text  null: of all handlers
--   $2 state      text  ok, or null for all states; list_odd_schedules lists the other states
--   $3 owner      text  null: of all owners
--   $4 name_like  text  a pattern of LIKE; null: of all names
--   $5 limit      int8
--   -> schedule_id int8?, name text?, cron text?, every interval?, timezone text?, handler text?, owner text?, state text?, next_fire_at timestamptz?, last_fire_at timestamptz?, last_success_at timestamptz?, consecutive_failures int4?, expect_success_within interval?, silent bool?, jitter interval?, declared_by text?, invalid_reason text?, now timestamptz?
--   silent  no success within expect_success_within; before the first success, the time counts from the creation
select
    schedule.schedule_id, schedule.name, schedule.cron, schedule.every, schedule.timezone, schedule.handler, schedule.owner,
    schedule.state, schedule.next_fire_at, schedule.last_fire_at, schedule.last_success_at, schedule.consecutive_failures,
    schedule.expect_success_within,
    not schedule.paused
        and extract(epoch from coalesce(schedule.last_success_at, schedule.created_at)) + extract(epoch from schedule.expect_success_within)
            < extract(epoch from now()) as silent,
    schedule.jitter, schedule.declared_by, schedule.invalid_reason, now() as now
from rota.schedules as schedule
where ($1::text is null or schedule.handler = $1)
  and ($3::text is null or schedule.owner = $3)
  and ($4::text is null or schedule.name like $4)
  and ($2::text is null or schedule.state = $2)
order by schedule.name
limit $5
