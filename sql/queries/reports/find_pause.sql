-- Find in the audit which user paused a schedule and why. A plain UPDATE writes no audit row.
--   $1 name   text
--   $2 since  timestamptz  when it was paused
--   -> paused_by text?, reason text?
-- rota.pause_schedules writes its audit row at the end of its batch, so that row is the next one after the pause.
select pause.done_by as paused_by, pause.reason
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
) as pause
order by pause.rank
limit 1
