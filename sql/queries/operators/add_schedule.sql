-- Insert a schedule, unless there is one of that name.
--   $1 columns  text  JSON object: name, handler, paused and the like; what isn't named gets its default
--   $2 payload  text  JSON, null: the default
--   -> schedule_id int8?
-- The payload has a parameter of its own, for within the object a JSON null would be an SQL null.
insert into rota.schedules (
    name, payload, paused, resume_at,
    cron, every, timezone, handler, queue, priority, max_attempts, backoff_base, backoff_cap, retry_for, timeout,
    lease, delivery, start_within, meta, start_at, end_at, misfire, on_time_within, too_late_after, catch_up_limit,
    overlap, dst_gap, dst_fold, jitter, description, owner, expect_success_within
)
select
    given.name, $2::text::jsonb, given.paused, given.resume_at,
    given.cron, given.every, given.timezone, given.handler, given.queue, given.priority, given.max_attempts,
    given.backoff_base, given.backoff_cap, given.retry_for, given.timeout, given.lease, given.delivery,
    given.start_within, given.meta, given.start_at, given.end_at, given.misfire, given.on_time_within,
    given.too_late_after, given.catch_up_limit, given.overlap, given.dst_gap, given.dst_fold, given.jitter,
    given.description, given.owner, given.expect_success_within
from jsonb_populate_record(null::rota.schedules, $1::text::jsonb) as given
on conflict (name) do nothing
returning schedule_id
