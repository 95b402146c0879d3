-- Sample the schedules for the gauges: how many are in which state, and when those last succeeded that are watched.
--   $1 most  int8  most watched schedules that are named
--   -> state text?, schedules int8?, watched text?, succeeded_at float8?
-- Named are watched schedules that code has declared; of all others the one that has been without success for longest, as null.
with counted as (
    select schedule.state, count(*) as schedules
    from rota.schedules as schedule
    group by schedule.state
),
watched as (
    select
        case
            when schedule.declared_by is not null
                and row_number() over (order by schedule.declared_by is null, schedule.name) <= $1
            then schedule.name
        end as name,
        extract(epoch from coalesce(schedule.last_success_at, schedule.created_at))::float8 as succeeded_at
    from rota.schedules as schedule
    where schedule.expect_success_within is not null
      and not schedule.paused
)
select counted.state, counted.schedules, null as watched, null::float8 as succeeded_at
from counted
union all
select null, null, watched.name, min(watched.succeeded_at)
from watched
group by watched.name
