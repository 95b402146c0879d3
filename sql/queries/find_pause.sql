-- Find who has paused a schedule, and why, where rota.pause_schedule did it: a plain UPDATE leaves neither.
--   $1 name   text
--   $2 since  timestamptz  when it was paused
--   -> paused_by text?, reason text?
select audit.done_by as paused_by, audit.reason
from rota.audit as audit
where audit.action = 'pause'
  and audit.target = 'schedule ' || $1
  and audit.done_at >= $2::timestamptz - interval '1 minute'
order by audit.audit_id desc
limit 1
