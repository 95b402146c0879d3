-- Read the due schedules of some shards, the unplanned ones, and long-overdue ones of all other shards.
-- Schedules with the same settings and instants share one row, because the same decision applies to them.
-- Locks nothing: record_fires stores a decision only if the schedule has not changed since.
--   $1 shards    int2[]       shards to read
--   $2 overdue   interval     read schedules of other shards if they have been due for longer than this
--   $3 turn      int4         shard at which the overdue schedules start; each node uses another shard
--   $4 floor     timestamptz  read schedules due after this instant (-infinity: all, and the overdue ones)
--   $5 floor_id  int8         of schedules due at $4, read those after this schedule_id (with -infinity: the largest int8)
--   $6 new_id    int8         of unplanned schedules, read those after this schedule_id
--   $7 limit     int8         limit of due schedules; half of it is the limit of unplanned ones
--   $8 horizon   interval     how far ahead to look for the next due schedule
--   -> schedule_ids int8[]?, versions int8[]?, paused bool?, next_fire_at timestamptz?, base timestamptz?, paused_from timestamptz?, cron text?, every interval?, anchor timestamptz?, timezone text?, start_at timestamptz?, end_at timestamptz?, dst_gap text?, dst_fold text?, misfire text?, on_time_within interval?, too_late_after interval?, catch_up_limit int4?, overlap text?, now timestamptz?, next_in interval?, waiting bool?, payload_bytes int4?
-- Always returns at least one row. Its schedule_ids are null if nothing is due.
--   next_fire_at  null: not planned yet
--   base          instant from which to plan: the later of the last edit and the last decided instant
--   anchor        instant from which `every` counts
--   next_in       time until the next schedule of these shards is due
--   waiting       whether there are waiting fires
--   payload_bytes size of the largest payload as stored
-- index: take_due_schedules_idx, schedule_definitions_pkey (0005)
-- The floor skips dead index entries. Earlier decisions leave them behind, and an old snapshot keeps them there.
-- `base` is truncated to seconds, which makes no difference to a cron expression, so that schedules inserted together share a row.
-- Overdue schedules are limited by index order before they are sorted: otherwise the planner starts parallel workers.
-- Each scan has one lower bound, because an index scan can start from one bound only.
-- The upper bounds are subqueries, for which the planner assumes a third of the table. With plain values, and statistics in which
-- almost nothing is due, it would read and sort all due rows.
-- Do not compare next_fire_at with `=`: the planner would scan the whole primary key to get the order.
with own_shard_schedules as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.next_fire_at <= (select now())
      and (clock.next_fire_at, clock.schedule_id) > ($4::timestamptz, $5::int8)
      and clock.shard = any ($1::int2[])
    order by clock.next_fire_at, clock.schedule_id
    limit $7
),
unplanned_schedules as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.next_fire_at <= timestamptz '-infinity'
      and (clock.next_fire_at, clock.schedule_id) > (timestamptz '-infinity', $6::int8)
      and clock.shard = any ($1::int2[])
    order by clock.next_fire_at, clock.schedule_id
    limit $7 / 2
),
overdue_schedules as materialized (
    select candidate.schedule_id, candidate.version, candidate.next_fire_at, candidate.last_fire_at, candidate.paused_from
    from (
        select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from, clock.shard
        from rota.schedule_clocks as clock
        where clock.next_fire_at <= (select now() - $2::interval)
          and $4::timestamptz = timestamptz '-infinity'
          and clock.shard <> all ($1::int2[])
          and cardinality($1::int2[]) < 256
        order by clock.next_fire_at, clock.schedule_id
        limit $7 * 10
    ) as candidate
    order by (candidate.shard + $3::int4) % 256, candidate.schedule_id
    limit $7
),
due_schedules as materialized (
    select * from own_shard_schedules
    union all
    select * from unplanned_schedules
    union all
    select * from overdue_schedules
),
groups as materialized (
    select
        array_agg(due_schedules.schedule_id) as schedule_ids,
        array_agg(due_schedules.version) as versions,
        definition.paused,
        nullif(due_schedules.next_fire_at, timestamptz '-infinity') as next_fire_at,
        case
            when due_schedules.next_fire_at > timestamptz '-infinity' and definition.dst_gap = 'after' then null
            when definition.every is null
            then date_trunc('second', greatest(definition.edited_at, due_schedules.last_fire_at))
            else greatest(definition.edited_at, due_schedules.last_fire_at)
        end as base, due_schedules.paused_from, definition.cron, definition.every,
        case when definition.every is not null then coalesce(definition.start_at, definition.created_at) end as anchor,
        definition.timezone, definition.start_at, definition.end_at, definition.dst_gap, definition.dst_fold,
        definition.misfire, definition.on_time_within, definition.too_late_after, definition.catch_up_limit, definition.overlap,
        max(pg_column_size(definition.payload)) as payload_bytes
    from due_schedules
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = due_schedules.schedule_id
        offset 0
    ) as definition
    -- The columns that differ most come first, so that the sort compares one column in most cases.
    group by
        7, 9, 4, 5, 3, 6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19
)
select
    groups.schedule_ids, groups.versions, groups.paused, groups.next_fire_at, groups.base, groups.paused_from, groups.cron,
    groups.every, groups.anchor, groups.timezone, groups.start_at, groups.end_at, groups.dst_gap, groups.dst_fold,
    groups.misfire, groups.on_time_within, groups.too_late_after, groups.catch_up_limit, groups.overlap,
    now() as now,
    (
        select clock.next_fire_at
        from rota.schedule_clocks as clock
        where clock.next_fire_at > now()
          and clock.next_fire_at <= now() + $8::interval
          and clock.shard = any ($1::int2[])
        order by clock.next_fire_at
        limit 1
    ) - clock_timestamp() as next_in,
    exists (select from rota.fires where fires.disposition = 'waiting') as waiting,
    groups.payload_bytes
from (select) as one_row
left join groups on true
order by groups.next_fire_at nulls last
