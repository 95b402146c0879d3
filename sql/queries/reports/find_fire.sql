-- Find the fire for one instant of a schedule: its own row, else the row of the stretch of missed instants that covers it.
--   $1 schedule_id  int8
--   $2 at           timestamptz
--   $3 most         int8  number of the schedule's rows after that instant to search for the stretch
--   -> schedule_id int8?, name text?, scheduled_for timestamptz?, disposition text?, decided_at timestamptz?, job_id int8?, job_state text?, missed_from timestamptz?, missed_count int4?, note text?
-- index: list_fires_idx (0005), fires_pkey (0005)
-- A stretch has the scheduled_for of its last instant. Between an instant and that row there are only manual runs and backfills.
with covering as materialized (
    select later.scheduled_for
    from (
        select each_fire.scheduled_for, each_fire.missed_from
        from (
            select each_day
            from generate_series(
                ($2::timestamptz at time zone 'UTC')::date - date '1970-01-01',
                (select (max(scheduled_for) at time zone 'UTC')::date - date '1970-01-01' from rota.fire_history)
            ) as each_day
            order by each_day
        ) as day
        cross join lateral (
            select history.scheduled_for, history.missed_from
            from rota.fire_history as history
            where (((history.scheduled_for at time zone 'UTC')::date - date '1970-01-01')::int8 << 40 | (history.schedule_id & 1099511627775))
                    = (day.each_day::int8 << 40 | ($1 & 1099511627775))
              and history.schedule_id = $1
              and history.scheduled_for >= $2
            order by history.scheduled_for
            limit $3
        ) as each_fire
        limit $3
    ) as later
    where later.scheduled_for = $2 or later.missed_from <= $2
    limit 1
)
select
    fire.schedule_id, fire.name, fire.scheduled_for, fire.disposition, fire.decided_at, fire.job_id, fire.job_state,
    fire.missed_from, fire.missed_count, fire.note
from covering
cross join lateral (
    select *
    from rota.fire_history
    where fire_history.scheduled_for = covering.scheduled_for
      and fire_history.schedule_id = $1
    offset 0
) as fire
