-- Read a page of cron schedules that are planned and not paused, to plan them again after an upgrade.
-- Schedules with the same settings and instants share one row.
--   $1 after  int8  only schedule_ids after this one
--   $2 limit  int8  schedules per page
--   -> schedule_ids int8[]?, versions int8[]?, paused bool?, next_fire_at timestamptz?, base timestamptz?, paused_from timestamptz?, cron text?, every interval?, anchor timestamptz?, timezone text?, start_at timestamptz?, end_at timestamptz?, dst_gap text?, dst_fold text?, misfire text?, on_time_within interval?, too_late_after interval?, catch_up_limit int4?, overlap text?, last int8?
-- Always returns at least one row. The columns are those of take_due_schedules, except:
--   base  the latest of now, the last edit and the last decided instant (later than now if the server's clock was set back)
--   last  the last schedule_id of a full page; null: this was the last page
-- index: schedule_clocks_pkey, schedule_definitions_pkey (0005)
-- Due schedules are excluded. Paused schedules are excluded because their next_fire_at is the end of the pause.
with page as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.schedule_id > $1
    order by clock.schedule_id
    limit $2
),
groups as materialized (
    select
        array_agg(page.schedule_id) as schedule_ids, array_agg(page.version) as versions, definition.paused, page.next_fire_at,
        greatest(now(), definition.edited_at, page.last_fire_at) as base, page.paused_from, definition.cron, definition.every,
        null::timestamptz as anchor, definition.timezone, definition.start_at, definition.end_at, definition.dst_gap,
        definition.dst_fold, definition.misfire, definition.on_time_within, definition.too_late_after,
        definition.catch_up_limit, definition.overlap
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
    groups.schedule_ids, groups.versions, groups.paused, groups.next_fire_at, groups.base, groups.paused_from, groups.cron,
    groups.every, groups.anchor, groups.timezone, groups.start_at, groups.end_at, groups.dst_gap, groups.dst_fold,
    groups.misfire, groups.on_time_within, groups.too_late_after, groups.catch_up_limit, groups.overlap,
    (select page.schedule_id from page order by page.schedule_id offset $2 - 1) as last
from (select) as one_row
left join groups on true
