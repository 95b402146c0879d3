-- List the fires of a schedule, the latest first.
--   $1 schedule_id  int8
--   $2 limit        int8
--   -> schedule_id int8?, name text?, scheduled_for timestamptz?, disposition text?, decided_at timestamptz?, job_id int8?, job_state text?, missed_from timestamptz?, missed_count int4?, note text?
-- index: list_fires_idx (0005), fires_pkey (0005)
-- Reads one UTC day after the other, backwards from the latest fire of all schedules, until $2 rows are found.
select
    fire.schedule_id, fire.name, fire.scheduled_for, fire.disposition, fire.decided_at, fire.job_id, fire.job_state,
    fire.missed_from, fire.missed_count, fire.note
from (
    select each_day
    from generate_series(
        (select (max(scheduled_for) at time zone 'UTC')::date - date '1970-01-01' from rota.fire_history),
        (select (min(scheduled_for) at time zone 'UTC')::date - date '1970-01-01' from rota.fire_history),
        -1
    ) as each_day
    order by each_day desc
) as day
cross join lateral (
    select *
    from rota.fire_history as history
    where (((history.scheduled_for at time zone 'UTC')::date - date '1970-01-01')::int8 << 40 | (history.schedule_id & 1099511627775))
            = (day.each_day::int8 << 40 | ($1 & 1099511627775))
      and history.schedule_id = $1
    order by history.scheduled_for desc
    limit $2
) as fire
limit $2
