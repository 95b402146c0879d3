-- Sample for the gauges when those schedules last succeeded that are watched.
--   $1 most  int8  most that are named
--   -> watched text?, succeeded_at float8?
-- index: sample_watched_schedules_idx (0007), schedule_clocks_pkey (0005)
-- Named are watched schedules that code has declared; of all others the one that has been without success for longest, as null.
select watched.name as watched, min(watched.succeeded_at) as succeeded_at
from (
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
) as watched
group by watched.name
