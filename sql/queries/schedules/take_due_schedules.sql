-- Read the schedules that are due, those alike in all that decides about them as one row. Locks nothing: see record_fires.
--   $1 shards    int2[]       whose schedules are looked at
--   $2 overdue   interval     … and anybody's that have been due for longer than this
--   $3 turn      int4         in which order of shards those are taken: another one on each node
--   $4 floor     timestamptz  look at what is due after this instant (-infinity: at all of it, and at the overdue) …
--   $5 floor_id  int8         … and, of what is due at this instant, after this schedule_id (at -infinity: the largest there is)
--   $6 new_id    int8         of what is to be planned, look after this schedule_id
--   $7 limit     int8         most schedules that are due; of those to be planned half as many
--   $8 horizon   interval     how far to look for what is due next
--   -> schedule_ids int8[]?, versions int8[]?, paused bool?, next_fire_at timestamptz?, base timestamptz?, paused_from timestamptz?, cron text?, every interval?, anchor timestamptz?, timezone text?, start_at timestamptz?, end_at timestamptz?, dst_gap text?, dst_fold text?, misfire text?, on_time_within interval?, too_late_after interval?, catch_up_limit int4?, overlap text?, now timestamptz?, next_in interval?, waiting bool?
-- At least one row comes back, for now, next_in (how long until the next of these shards is due) and waiting (fires that wait
-- for their turn). Its schedule_ids are null when nothing is due.
--   next_fire_at  null: to be planned, from base on (the later of the last edit and the last decision)
--   anchor        what every counts from
-- index: take_due_schedules_idx, schedule_definitions_pkey (0005)
-- Without the floor, every look walks the dead index entries that earlier decisions left behind, which a snapshot held by
-- somebody keeps there. Base is cut to seconds, which no cron expression can tell apart, so that schedules inserted together
-- are alike. The overdue are taken by the index before they are sorted, else the planner sets parallel workers on them. One lower bound each, for an index scan starts from one only.
-- The bounds as subqueries: of those the planner assumes that they let a third of the table through. Where its statistics say that next to
-- nothing is due, it would read and sort everything that is. No equality with next_fire_at: the planner would then take the order from the primary key, and walk all of it.
with ours as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.next_fire_at <= (select now())
      and (clock.next_fire_at, clock.schedule_id) > ($4::timestamptz, $5::int8)
      and clock.shard = any ($1::int2[])
    order by clock.next_fire_at, clock.schedule_id
    limit $7
),
unplanned as materialized (
    select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from
    from rota.schedule_clocks as clock
    where clock.next_fire_at <= timestamptz '-infinity'
      and (clock.next_fire_at, clock.schedule_id) > (timestamptz '-infinity', $6::int8)
      and clock.shard = any ($1::int2[])
    order by clock.next_fire_at, clock.schedule_id
    limit $7 / 2
),
overdue as materialized (
    select longest.schedule_id, longest.version, longest.next_fire_at, longest.last_fire_at, longest.paused_from
    from (
        select clock.schedule_id, clock.version, clock.next_fire_at, clock.last_fire_at, clock.paused_from, clock.shard
        from rota.schedule_clocks as clock
        where clock.next_fire_at <= (select now() - $2::interval)
          and $4::timestamptz = timestamptz '-infinity'
          and clock.shard <> all ($1::int2[])
          and cardinality($1::int2[]) < 256
        order by clock.next_fire_at, clock.schedule_id
        limit $7 * 10
    ) as longest
    order by (longest.shard + $3::int4) % 256, longest.schedule_id
    limit $7
),
due as materialized (
    select * from ours
    union all
    select * from unplanned
    union all
    select * from overdue
),
alike as materialized (
    select
        array_agg(due.schedule_id) as schedule_ids,
        array_agg(due.version) as versions,
        definition.paused,
        nullif(due.next_fire_at, timestamptz '-infinity') as next_fire_at,
        case
            when due.next_fire_at > timestamptz '-infinity' and definition.dst_gap = 'after' then null
            when definition.every is null
            then date_trunc('second', greatest(definition.edited_at, due.last_fire_at))
            else greatest(definition.edited_at, due.last_fire_at)
        end as base,
        due.paused_from, definition.cron, definition.every,
        case when definition.every is not null then coalesce(definition.start_at, definition.created_at) end as anchor,
        definition.timezone, definition.start_at, definition.end_at, definition.dst_gap, definition.dst_fold,
        definition.misfire, definition.on_time_within, definition.too_late_after, definition.catch_up_limit,
        definition.overlap
    from due
    cross join lateral (
        select *
        from rota.schedule_definitions
        where schedule_definitions.schedule_id = due.schedule_id
        offset 0
    ) as definition
    -- By what differs most first, for the sort's sake: it decides most comparisons by one column.
    group by
        7, 9, 4, 5, 3, 6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19
)
select
    alike.schedule_ids, alike.versions, alike.paused, alike.next_fire_at, alike.base, alike.paused_from, alike.cron,
    alike.every, alike.anchor, alike.timezone, alike.start_at, alike.end_at, alike.dst_gap, alike.dst_fold,
    alike.misfire, alike.on_time_within, alike.too_late_after, alike.catch_up_limit, alike.overlap,
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
    exists (select from rota.fires where fires.disposition = 'waiting') as waiting
from (select) as always
left join alike on true
order by alike.next_fire_at nulls last
