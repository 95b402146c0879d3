-- Write the limits that an app declares: insert missing ones, and edit those whose `declared` is still as it was read.
--   $1 app       text
--   $2 inserts   text  JSON array of objects: columns and declared (as JSON text)
--   $3 edits     text  JSON array of objects: name, expected (`declared` as it was read, as JSON text), columns, declared
--   -> name text?
-- index: limits_pkey (0012)
-- A limit that is not returned was written or locked by another session: read it again.
-- Inserts and edits are ordered by key: two daemons that start at the same time would deadlock otherwise.
with inserted_limits as (
    insert into rota.limits (key, max_running, max_starts, per, declared_by, declared)
    select columns.name, columns.max_running, columns.max_starts, columns.per, $1, declaration.declared::jsonb
    from jsonb_to_recordset($2::text::jsonb) as declaration (columns jsonb, declared text)
    cross join lateral jsonb_to_record(declaration.columns) as columns (name text, max_running integer, max_starts integer, per interval)
    order by columns.name
    on conflict (key) do nothing
    returning key
),
locked_limits as materialized (
    select declaration.name, declaration.columns, declaration.declared
    from jsonb_to_recordset($3::text::jsonb) as declaration (name text, expected text, columns jsonb, declared text)
    cross join lateral (
        select
        from rota.limits
        where limits.key = declaration.name
          and limits.declared is not distinct from declaration.expected::jsonb
        for update skip locked
    ) as locked
    order by declaration.name
),
edited_limits as (
    update rota.limits as existing
    set max_running = case when columns ? 'max_running' then (columns ->> 'max_running')::integer else existing.max_running end,
        max_starts = case when columns ? 'max_starts' then (columns ->> 'max_starts')::integer else existing.max_starts end,
        per = case when columns ? 'per' then (columns ->> 'per')::interval else existing.per end,
        declared_by = $1,
        declared = locked_limits.declared::jsonb
    from locked_limits
    where existing.key = locked_limits.name
    returning existing.key
)
select inserted_limits.key as name from inserted_limits
union all
select edited_limits.key from edited_limits
