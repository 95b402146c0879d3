-- Find up to three intervals and instants outside of rota's limits, in jobs, dead letters and schedules.
--   -> owner text?, column_name text?, value text?
-- Explains an error such as `timestamp out of range`, in which PostgreSQL names neither the row nor the column. Such values were
-- written without the constraints.
select bad.owner, bad.column_name, bad.value
from (
    select 'schedule ' || schedule.name as owner, field.column_name, field.value::text as value
    from rota.schedules as schedule
    cross join lateral (
        values
            ('every', schedule.every), ('backoff_base', schedule.backoff_base), ('backoff_cap', schedule.backoff_cap),
            ('retry_for', schedule.retry_for), ('timeout', schedule.timeout), ('lease', schedule.lease),
            ('start_within', schedule.start_within), ('on_time_within', schedule.on_time_within),
            ('too_late_after', schedule.too_late_after), ('jitter', schedule.jitter),
            ('expect_success_within', schedule.expect_success_within)
    ) as field (column_name, value)
    where field.value < interval '0' or field.value > interval '366 days'
       or extract(day from field.value) not between 0 and 366 or extract(month from field.value) <> 0
    union all
    select 'job ' || job.job_id, field.column_name, field.value::text
    from rota.jobs as job
    cross join lateral (
        values
            ('backoff_base', job.backoff_base), ('backoff_cap', job.backoff_cap), ('retry_for', job.retry_for),
            ('timeout', job.timeout), ('lease', job.lease)
    ) as field (column_name, value)
    where field.value < interval '0' or field.value > interval '366 days'
       or extract(day from field.value) not between 0 and 366 or extract(month from field.value) <> 0
    union all
    select 'job ' || job.job_id, field.column_name, field.value::text
    from rota.jobs as job
    cross join lateral (
        values ('run_at', job.run_at), ('scheduled_for', job.scheduled_for), ('start_by', job.start_by)
    ) as field (column_name, value)
    where field.value < timestamptz '1970-01-01 00:00:00+00' or field.value >= timestamptz '2200-01-01 00:00:00+00'
    union all
    select 'job ' || letter.job_id, field.column_name, field.value::text
    from rota.dead_letters as letter
    cross join lateral (
        values
            ('backoff_base', letter.backoff_base), ('backoff_cap', letter.backoff_cap), ('retry_for', letter.retry_for),
            ('timeout', letter.timeout), ('lease', letter.lease)
    ) as field (column_name, value)
    where field.value < interval '0' or field.value > interval '366 days'
       or extract(day from field.value) not between 0 and 366 or extract(month from field.value) <> 0
) as bad
limit 3
