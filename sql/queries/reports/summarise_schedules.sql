-- Count schedules by state. A schedule without a success within expect_success_within is counted a second time, as `silent`.
--   -> state text?, schedules int8?
-- index: count_stopped_schedules_idx, count_paused_schedules_idx, sample_watched_schedules_idx (0005), take_due_schedules_idx, schedule_clocks_pkey, schedule_definitions_pkey (0005)
-- The states must agree with the view rota.schedules. They are counted here from partial indexes on the exceptions, because the
-- view takes four seconds for a million schedules. A definition without a clock is invalid.
with schedules_not_ok as (
    select case when clock.invalid_reason is not null then 'invalid' else 'paused' end as state
    from rota.schedule_definitions as definition
    cross join lateral (
        select clocks.invalid_reason
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = definition.schedule_id
        offset 0
    ) as clock
    where definition.paused
    union all
    select case when clock.invalid_reason is not null then 'invalid' else 'ended' end
    from rota.schedule_clocks as clock
    cross join lateral (
        select definitions.paused
        from rota.schedule_definitions as definitions
        where definitions.schedule_id = clock.schedule_id
        offset 0
    ) as definition
    where clock.next_fire_at is null
      and not definition.paused
    union all
    select case when clock.invalid_reason is not null then 'invalid' else 'overdue' end
    from rota.schedule_clocks as clock
    cross join lateral (
        select definitions.paused, definitions.edited_at
        from rota.schedule_definitions as definitions
        where definitions.schedule_id = clock.schedule_id
        offset 0
    ) as definition
    where clock.next_fire_at < now() - interval '30 seconds'
      and not definition.paused
      and (clock.next_fire_at > timestamptz '-infinity' or definition.edited_at < now() - interval '30 seconds')
),
state_counts as (
    select state_count.state, sum(state_count.schedules)::int8 as schedules
    from (
        select schedules_not_ok.state, count(*) as schedules
        from schedules_not_ok
        group by schedules_not_ok.state
        union all
        select 'invalid', (select count(*) from rota.schedule_definitions) - (select count(*) from rota.schedule_clocks)
    ) as state_count
    where state_count.schedules > 0
    group by state_count.state
)
select state_counts.state, state_counts.schedules
from state_counts
union all
select
    'ok',
    (select count(*) from rota.schedule_definitions) - coalesce((select sum(state_counts.schedules) from state_counts), 0)::int8
union all
select 'silent', count(*)
from rota.schedule_definitions as definition
cross join lateral (
    select clocks.last_success_at
    from rota.schedule_clocks as clocks
    where clocks.schedule_id = definition.schedule_id
    offset 0
) as clock
where definition.expect_success_within is not null
  and not definition.paused
  and extract(epoch from coalesce(clock.last_success_at, definition.created_at)) + extract(epoch from definition.expect_success_within)
      < extract(epoch from now())
