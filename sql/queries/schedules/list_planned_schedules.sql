-- Read on what the next fires of cron schedules rest, those alike as one row, by pages of $2 schedules.
--   $1 after  int8  beyond this schedule_id
--   $2 limit  int8
--   -> schedule_ids int8[]?, versions int8[]?, paused bool?, next_fire_at timestamptz?, base timestamptz?, paused_from timestamptz?, cron text?, every interval?, anchor timestamptz?, timezone text?, start_at timestamptz?, end_at timestamptz?, dst_gap text?, dst_fold text?, misfire text?, on_time_within interval?, too_late_after interval?, catch_up_limit int4?, overlap text?, last int8?
-- At least one row comes back, for last, the end of a full page: null when there are no more. Columns as in take_due_schedules.
--   base  now, or what has been decided or edited later than that by a clock which has been set back since
-- index: schedule_clocks_pkey, schedule_definitions_pkey (0005)
-- What is due is left alone, and so is what is paused: its next_fire_at is the end of the pause.
with page as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.schedule_id > $1
    order by clock.schedule_id
    limit $2
),
alike as materialized (
    select
        array_agg(page.schedule_id) as schedule_ids,
        array_agg(page.version) as versions,
        definition.paused, page.next_fire_at,
        greatest(now(), definition.edited_at, page.last_fire_at) as base,
        page.paused_from, definition.cron, definition.every, null::timestamptz as anchor,
        definition.timezone, definition.start_at, definition.end_at, definition.dst_gap, definition.dst_fold,
        definition.misfire, definition.on_time_within, definition.too_late_after, definition.catch_up_limit,
        definition.overlap
    from page
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = page.schedule_id
        offset 0
    ) as definition
    where page.next_fire_at > now()
      and definition.cron is not null
      and not definition.paused
    group by
        7, 4, 5, 3, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19
)
select
    alike.schedule_ids, alike.versions, alike.paused, alike.next_fire_at, alike.base, alike.paused_from, alike.cron,
    alike.every, alike.anchor, alike.timezone, alike.start_at, alike.end_at, alike.dst_gap, alike.dst_fold,
    alike.misfire, alike.on_time_within, alike.too_late_after, alike.catch_up_limit, alike.overlap,
    (select page.schedule_id from page order by page.schedule_id offset $2 - 1) as last
from (select) as always
left join alike on true
