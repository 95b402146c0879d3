-- Update the last success and the consecutive failures of schedules whose jobs have ended.
--   $1 schedule_ids  int8[]  in ascending order
--   $2 succeeded     bool[]  whether at least one job succeeded
--   $3 failures      int4[]  number of jobs that failed after the last success
--   -> schedule_ids int8[]?  schedules whose row another session has locked: try again
-- index: schedule_clocks_pkey (0005)
with outcome as materialized (
    select outcome.schedule_id
    from unnest($1::int8[]) as outcome (schedule_id)
),
locked_clocks as materialized (
    select clock.row_id
    from outcome
    cross join lateral (
        select clocks.ctid as row_id
        from rota.schedule_clocks as clocks
        where clocks.schedule_id = outcome.schedule_id
        for update skip locked
    ) as clock
),
updated_clocks as (
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
    where clock.ctid = any (array(select locked_clocks.row_id from locked_clocks))
    returning clock.schedule_id
)
select array_agg(outcome.schedule_id) as schedule_ids
from outcome
where (outcome.schedule_id in (select updated_clocks.schedule_id from updated_clocks)) is not true
  and (select true from rota.schedule_clocks as clock where clock.schedule_id = outcome.schedule_id)
