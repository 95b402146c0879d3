-- Insert a schedule. Returns no row if the name is taken.
--   $1 columns  text  JSON object: column -> value; other columns get their default
--   $2 payload  text  JSON; null: the default
--   -> schedule_id int8?
-- The payload is a separate parameter, because a JSON null inside of the object would become an SQL null.
insert into rota.schedules (
    name, payload, paused, resume_at, cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap,
    retry_for, timeout, lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after,
    catch_up_limit, overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within, limit_key
)
select
    input.name, $2::text::jsonb, input.paused, input.resume_at, input.cron, input.every, input.timezone, input.handler,
    input.queue, input.priority, input.max_attempts, input.backoff_base, input.backoff_cap, input.retry_for, input.timeout,
    input.lease, input.delivery, input.start_within, input.meta, input.start_at, input.end_at, input.misfire,
    input.on_time_within, input.too_late_after, input.catch_up_limit, input.overlap, input.dst_gap, input.dst_fold,
    input.jitter, input.description, input.owner, input.expect_success_within, input.limit_key
from jsonb_populate_record(null::rota.schedules, $1::text::jsonb) as input
on conflict (name) do nothing
returning schedule_id
