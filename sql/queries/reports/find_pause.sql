-- Find who has paused a schedule, and why, by rota.pause_schedule or rota.pause_schedules: a plain UPDATE leaves neither.
--   $1 name   text
--   $2 since  timestamptz  when it was paused
--   -> paused_by text?, reason text?
-- A pause of many is recorded when its batch ends, so its row is the next one after the pause.
select found.done_by as paused_by, found.reason
from (
    (
        select audit.done_by, audit.reason, 1 as rank
        from rota.audit as audit
        where audit.action = 'pause'
          and audit.target = 'schedule ' || $1
          and audit.done_at >= $2::timestamptz - interval '1 minute'
        order by audit.audit_id desc
        limit 1
    )
    union all
    (
        select audit.done_by, audit.reason, 2
        from rota.audit as audit
        where audit.action = 'pause'
          and starts_with(audit.target, 'schedules: ')
          and audit.done_at between $2 and $2 + interval '5 minutes'
        order by audit.audit_id
        limit 1
    )
) as found
order by found.rank
limit 1
