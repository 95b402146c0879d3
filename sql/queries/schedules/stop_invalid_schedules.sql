-- Let schedules stand still that can't be planned, and say why, where nobody has edited them meanwhile.
--   $1 schedule_ids  int8[]
--   $2 versions      int8[]
--   $3 reasons       text[]
--   -> schedule_id int8, name text?, reason text?
-- index: schedule_clocks_pkey (0005)
with held as materialized (
    select clock.schedule_id, decision.reason
    from unnest($1::int8[], $2::int8[], $3::text[]) as decision (schedule_id, version, reason)
    cross join lateral (
        select clocks.schedule_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = decision.schedule_id
          and clocks.version is not distinct from decision.version
        for update skip locked
    ) as clock
),
stopped as (
    update rota.schedule_clocks as clock
    set next_fire_at = null,
        invalid_reason = held.reason
    from held
    where clock.schedule_id = any (array(select held.schedule_id from held))
      and held.schedule_id = clock.schedule_id
    returning clock.schedule_id, held.reason
)
select
    stopped.schedule_id,
    (select definition.name from rota.schedule_definitions as definition where definition.schedule_id = stopped.schedule_id)
        as name,
    stopped.reason
from stopped
