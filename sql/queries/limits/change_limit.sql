-- Change some values of a limit, or insert it with these values.
--   $1 key      text
--   $2 columns  text  JSON object: column -> value; null: no such limit
--   -> inserted bool?
-- index: limits_pkey (0012)
-- Not by ON CONFLICT: the constraints apply to the row to insert even if it is not inserted.
with input as materialized (
    select $2::text::jsonb as columns, given.max_running, given.max_starts, given.per, given.weight, given.note
    from jsonb_to_record($2::text::jsonb) as given (max_running integer, max_starts integer, per interval, weight integer, note text)
),
changed_limits as (
    update rota.limits
    set max_running = case when input.columns ? 'max_running' then input.max_running else limits.max_running end,
        max_starts = case when input.columns ? 'max_starts' then input.max_starts else limits.max_starts end,
        per = case when input.columns ? 'per' then input.per else limits.per end,
        weight = case when input.columns ? 'weight' then input.weight else limits.weight end,
        note = case when input.columns ? 'note' then input.note else limits.note end
    from input
    where limits.key = $1
    returning false as inserted
),
inserted_limits as (
    insert into rota.limits (key, max_running, max_starts, per, weight, note)
    select $1, input.max_running, input.max_starts, input.per, input.weight, input.note
    from input
    where not exists (select from changed_limits)
    returning true as inserted
)
select changed_limits.inserted from changed_limits
union all
select inserted_limits.inserted from inserted_limits
