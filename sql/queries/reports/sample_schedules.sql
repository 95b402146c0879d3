-- Read the metrics about watched schedules (those with expect_success_within): when each last succeeded.
--   $1 most  int8  number of schedules to return by name
--   -> watched text?, succeeded_at float8?
-- index: sample_watched_schedules_idx (0005), schedule_clocks_pkey (0005)
--   watched       name of a schedule that was declared in code; null: the oldest success among all other watched schedules
--   succeeded_at  seconds since 1970
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
