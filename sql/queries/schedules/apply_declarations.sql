-- Write the schedules that an app declares: insert missing ones, and edit those whose `declared` is still as it was read.
--   $1 app       text
--   $2 inserts   text  JSON array of objects: columns, payload and declared (both JSON as text, or null)
--   $3 edits     text  JSON array of objects: name, expected (`declared` as it was read, as JSON text), columns, payload, declared
--   -> name text?, made bool?
--   made  true: inserted; false: edited
-- A schedule that is not returned was written or locked by another session: read it again.
-- payload and declared are text within the JSON, so that Python does not round their numbers.
-- Inserts and edits are ordered by name: two daemons that start at the same time would deadlock otherwise.
with inserted_schedules as (
    insert into rota.schedules (
        name, payload, paused, declared_by, declared,
        cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after,
        catch_up_limit, overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within, limit_key
    )
    select
        columns.name, declaration.payload::jsonb, columns.paused, $1, declaration.declared::jsonb,
        columns.cron, columns.every, columns.timezone, columns.handler, columns.queue, columns.priority,
        columns.max_attempts, columns.backoff_base, columns.backoff_cap, columns.retry_for, columns.timeout,
        columns.lease, columns.delivery, columns.start_within, columns.meta, columns.start_at, columns.end_at,
        columns.misfire, columns.on_time_within, columns.too_late_after, columns.catch_up_limit, columns.overlap,
        columns.dst_gap, columns.dst_fold, columns.jitter, columns.description, columns.owner,
        columns.expect_success_within, columns.limit_key
    from jsonb_to_recordset($2::text::jsonb) as declaration (columns jsonb, payload text, declared text)
    cross join lateral jsonb_populate_record(null::rota.schedules, declaration.columns) as columns
    order by columns.name
    on conflict (name) do nothing
    returning name
),
locked_schedules as materialized (
    select schedule.row_id, declaration.columns, declaration.payload, declaration.declared
    from jsonb_to_recordset($3::text::jsonb)
        as declaration (name text, expected text, columns jsonb, payload text, declared text)
    cross join lateral (
        select definition.schedule_id as row_id
        from rota.schedule_definitions as definition
        where definition.name = declaration.name
          and definition.declared is not distinct from declaration.expected::jsonb
        for update skip locked
    ) as schedule
    order by declaration.name
),
edited_schedules as (
    update rota.schedules as schedule
    set (
        payload, declared_by, declared,
        cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after,
        catch_up_limit, overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within, limit_key
    ) = (
        select
            coalesce(locked_schedules.payload::jsonb, schedule.payload), $1, locked_schedules.declared::jsonb,
            merged.cron, merged.every, merged.timezone, merged.handler, merged.queue, merged.priority,
            merged.max_attempts, merged.backoff_base, merged.backoff_cap, merged.retry_for, merged.timeout,
            merged.lease, merged.delivery, merged.start_within, merged.meta, merged.start_at, merged.end_at,
            merged.misfire, merged.on_time_within, merged.too_late_after, merged.catch_up_limit, merged.overlap,
            merged.dst_gap, merged.dst_fold, merged.jitter, merged.description, merged.owner,
            merged.expect_success_within, merged.limit_key
        from jsonb_populate_record(schedule, locked_schedules.columns) as merged
    )
    from locked_schedules
    where schedule.schedule_id = locked_schedules.row_id
    returning schedule.name
)
select inserted_schedules.name, true as made
from inserted_schedules
union all
select edited_schedules.name, false
from edited_schedules
