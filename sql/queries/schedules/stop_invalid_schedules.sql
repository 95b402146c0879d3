-- Stop schedules that can't be planned, and store the reason. Schedules that were edited since they were read are skipped.
--   $1 schedule_ids  int8[]
--   $2 versions      int8[]
--   $3 reasons       text[]
--   -> schedule_id int8, name text?, reason text?
-- index: schedule_clocks_pkey (0005)
with locked_clocks as materialized (
    select clock.schedule_id, input.reason
    from unnest($1::int8[], $2::int8[], $3::text[]) as input (schedule_id, version, reason)
    cross join lateral (
        select clocks.schedule_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = input.schedule_id
          and clocks.version is not distinct from input.version
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
