-- Write what an app declares: insert what is missing, change what is named of what is there, if it still is as it was read.
--   $1 app       text
--   $2 inserts   text  JSON array of objects: columns, payload and declared (both JSON as text, or null)
--   $3 edits     text  JSON array of objects: name, expected (what declared was, the same way), columns, payload, declared
--   -> name text?, made bool?
-- As text within JSON: numbers that Python would round arrive as they are.
-- Returns what was written, and whether it was inserted. What isn't returned, somebody else has written meanwhile, or has
-- locked: read it again. Both in the order of their names: two daemons that start at once would deadlock otherwise.
with inserted as (
    insert into rota.schedules (
        name, payload, paused, declared_by, declared,
        cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after,
        catch_up_limit, overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within
    )
    select
        columns.name, given.payload::jsonb, columns.paused, $1, given.declared::jsonb,
        columns.cron, columns.every, columns.timezone, columns.handler, columns.queue, columns.priority,
        columns.max_attempts, columns.backoff_base, columns.backoff_cap, columns.retry_for, columns.timeout,
        columns.lease, columns.delivery, columns.start_within, columns.meta, columns.start_at, columns.end_at,
        columns.misfire, columns.on_time_within, columns.too_late_after, columns.catch_up_limit, columns.overlap,
        columns.dst_gap, columns.dst_fold, columns.jitter, columns.description, columns.owner,
        columns.expect_success_within
    from jsonb_to_recordset($2::text::jsonb) as given (columns jsonb, payload text, declared text)
    cross join lateral jsonb_populate_record(null::rota.schedules, given.columns) as columns
    order by columns.name
    on conflict (name) do nothing
    returning name
),
held as materialized (
    select schedule.row_id, given.columns, given.payload, given.declared
    from jsonb_to_recordset($3::text::jsonb)
        as given (name text, expected text, columns jsonb, payload text, declared text)
    cross join lateral (
        select definition.schedule_id as row_id
        from rota.schedule_definitions as definition
        where definition.name = given.name
          and definition.declared is not distinct from given.expected::jsonb
        for update skip locked
    ) as schedule
    order by given.name
),
edited as (
    update rota.schedules as schedule
    set (
        payload, declared_by, declared,
        cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
        lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after,
        catch_up_limit, overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within
    ) = (
        select
            coalesce(held.payload::jsonb, schedule.payload), $1, held.declared::jsonb,
            merged.cron, merged.every, merged.timezone, merged.handler, merged.queue, merged.priority,
            merged.max_attempts, merged.backoff_base, merged.backoff_cap, merged.retry_for, merged.timeout,
            merged.lease, merged.delivery, merged.start_within, merged.meta, merged.start_at, merged.end_at,
            merged.misfire, merged.on_time_within, merged.too_late_after, merged.catch_up_limit, merged.overlap,
            merged.dst_gap, merged.dst_fold, merged.jitter, merged.description, merged.owner,
            merged.expect_success_within
        from jsonb_populate_record(schedule, held.columns) as merged
    )
    from held
    where schedule.schedule_id = held.row_id
    returning schedule.name
)
select inserted.name, true as made
from inserted
union all
select edited.name, false
from edited
