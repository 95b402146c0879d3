-- Count schedules by state; silent ones, which have not succeeded in time, once more under that name.
--   -> state text?, schedules int8?
select schedule.state, count(*) as schedules
from rota.schedules as schedule
group by schedule.state
union all
select 'silent', count(*)
from rota.schedules as schedule
where not schedule.paused
  and coalesce(schedule.last_success_at, schedule.created_at) < now() - schedule.expect_success_within
