-- Stop the schedules with an instant outside the years 1970 to 2200, or an interval outside 0 to 366 days.
--   -> schedule_id int8, name text?, reason text?
-- index: schedule_clocks_pkey, schedule_definitions_pkey (0005)
-- Scans all schedules. Needed only after reading due schedules failed on a value that was written without the constraints.
with unusable_schedules as materialized (
    select definition.schedule_id, bad_value.reason
    from rota.schedule_definitions as definition
    cross join lateral (
        select clocks.next_fire_at, clocks.last_fire_at, clocks.paused_from
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = definition.schedule_id
          and clocks.next_fire_at is not null
        offset 0
    ) as clock
    cross join lateral (
        select 'the value of ' || value.name || ' is out of range: correct it' as reason
        from (
            values
                ('next_fire_at', nullif(clock.next_fire_at, timestamptz '-infinity')),
                ('last_fire_at', clock.last_fire_at),
                ('paused_from', clock.paused_from),
                ('edited_at', definition.edited_at),
                ('created_at', definition.created_at),
                ('start_at', definition.start_at),
                ('end_at', definition.end_at),
                ('resume_at', definition.resume_at)
        ) as value (name, instant)
        where value.instant not between timestamptz '1970-01-01 00:00:00+00' and timestamptz '2201-01-01 00:00:00+00'
        union all
        select 'the value of ' || value.name || ' is out of range: correct it'
        from (
            values
                ('every', definition.every),
                ('on_time_within', definition.on_time_within),
                ('too_late_after', definition.too_late_after)
        ) as value (name, length)
        where value.length not between interval '0' and interval '366 days'
        limit 1
    ) as bad_value
),
locked_clocks as materialized (
    select unusable_schedules.schedule_id, unusable_schedules.reason
    from unusable_schedules
    cross join lateral (
        select clocks.schedule_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = unusable_schedules.schedule_id
        for update skip locked
    ) as clock
),
stopped_clocks as (
    update rota.schedule_clocks as clock
    set next_fire_at = null,
        invalid_reason = locked_clocks.reason
    from locked_clocks
    where clock.schedule_id = any (array(select locked_clocks.schedule_id from locked_clocks))
      and locked_clocks.schedule_id = clock.schedule_id
    returning clock.schedule_id, locked_clocks.reason
)
select
    stopped_clocks.schedule_id,
    (select definition.name from rota.schedule_definitions as definition where definition.schedule_id = stopped_clocks.schedule_id)
        as name,
    stopped_clocks.reason
from stopped_clocks
