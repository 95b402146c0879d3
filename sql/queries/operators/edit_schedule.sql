-- Change some columns of a schedule. Returns no row if there is no schedule of that name.
--   $1 name     text
--   $2 columns  text  JSON object: column -> value; null: its default
--   $3 payload  text  JSON; null: unchanged
--   -> schedule_id int8?
update rota.schedules as schedule
set (
    payload,
    cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
    lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after, catch_up_limit,
    overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within, limit_key
) = (
    select
        coalesce($3::text::jsonb, schedule.payload),
        merged.cron, merged.every, merged.timezone, merged.handler, merged.queue, merged.priority,
        merged.max_attempts, merged.backoff_base, merged.backoff_cap, merged.retry_for, merged.timeout, merged.lease,
        merged.delivery, merged.start_within, merged.meta, merged.start_at, merged.end_at, merged.misfire,
        merged.on_time_within, merged.too_late_after, merged.catch_up_limit, merged.overlap, merged.dst_gap,
        merged.dst_fold, merged.jitter, merged.description, merged.owner, merged.expect_success_within, merged.limit_key
    from jsonb_populate_record(schedule, $2::text::jsonb) as merged
)
where schedule.name = $1
returning schedule.schedule_id
