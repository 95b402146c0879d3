-- List schedules in a state other than ok, by name, without reading those that are ok.
--   $1 handler    text  null: of all handlers
--   $2 state      text  invalid, paused, overdue, ended or silent
--   $3 owner      text  null: of all owners
--   $4 name_like  text  a pattern of LIKE; null: of all names
--   $5 limit      int8
--   -> schedule_id int8?, name text?, cron text?, every interval?, timezone text?, handler text?, owner text?, state text?, next_fire_at timestamptz?, last_fire_at timestamptz?, last_success_at timestamptz?, consecutive_failures int4?, expect_success_within interval?, silent bool?, jitter interval?, declared_by text?, invalid_reason text?, now timestamptz?
-- Candidates come from the partial index for each state. The view then filters them, as in list_schedules.
select
    schedule.schedule_id, schedule.name, schedule.cron, schedule.every, schedule.timezone, schedule.handler, schedule.owner,
    schedule.state, schedule.next_fire_at, schedule.last_fire_at, schedule.last_success_at, schedule.consecutive_failures,
    schedule.expect_success_within,
    not schedule.paused
        and extract(epoch from coalesce(schedule.last_success_at, schedule.created_at)) + extract(epoch from schedule.expect_success_within)
            < extract(epoch from now()) as silent,
    schedule.jitter, schedule.declared_by, schedule.invalid_reason, now() as now
from rota.schedules as schedule
where schedule.schedule_id = any (array(
      select definition.schedule_id
      from rota.schedule_definitions as definition
      where $2::text in ('paused', 'invalid')
        and definition.paused
      union all
      select clock.schedule_id
      from rota.schedule_clocks as clock
      where $2 in ('ended', 'invalid')
        and clock.next_fire_at is null
      union all
      select clock.schedule_id
      from rota.schedule_clocks as clock
      where $2 in ('overdue', 'invalid')
        and clock.next_fire_at < now() - interval '30 seconds'
      union all
      select definition.schedule_id
      from rota.schedule_definitions as definition
      where $2 = 'invalid'
        and not exists (select from rota.schedule_clocks as clock where clock.schedule_id = definition.schedule_id)
      union all
      select definition.schedule_id
      from rota.schedule_definitions as definition
      where $2 = 'silent'
        and definition.expect_success_within is not null
        and not definition.paused
  ))
  and ($1::text is null or schedule.handler = $1)
  and ($3::text is null or schedule.owner = $3)
  and ($4::text is null or schedule.name like $4)
  and (
      schedule.state = $2
      or $2 = 'silent'
      and extract(epoch from coalesce(schedule.last_success_at, schedule.created_at)) + extract(epoch from schedule.expect_success_within)
            < extract(epoch from now())
  )
order by schedule.name
limit $5
