-- Note on schedules how their jobs ended.
--   $1 schedule_ids  int8[]  in ascending order
--   $2 succeeded     bool[]  whether one of its jobs succeeded, and …
--   $3 failures      int4[]  … how many failed since
--   -> schedule_ids int8[]?  whose clocks are locked by somebody at this moment: try again
-- index: schedule_clocks_pkey (0005)
with given as materialized (
    select given.schedule_id
    from unnest($1::int8[]) as given (schedule_id)
),
held as materialized (
    select clock.row_id
    from given
    cross join lateral (
        select clocks.ctid as row_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = given.schedule_id
        for update skip locked
    ) as clock
),
noted as (
    update rota.schedule_clocks as clock
    set last_success_at = case
            when ($2::bool[])[width_bucket(clock.schedule_id, $1::int8[])] then clock_timestamp()
            else clock.last_success_at
        end,
        consecutive_failures = least(
            case
                when ($2::bool[])[width_bucket(clock.schedule_id, $1::int8[])] then 0
                else clock.consecutive_failures
            end::int8 + ($3::int4[])[width_bucket(clock.schedule_id, $1::int8[])],
            2147483647
        )
    where clock.ctid = any (array(select held.row_id from held))
    returning clock.schedule_id
)
select array_agg(given.schedule_id) as schedule_ids
from given
where (given.schedule_id in (select noted.schedule_id from noted)) is not true
  and (select true from rota.schedule_clocks as clock where clock.schedule_id = given.schedule_id)
