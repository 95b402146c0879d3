-- List the attempts of a job that did not succeed, newest first; their error texts only if $2.
--   $1 job_id       int8
--   $2 with_errors  bool
--   -> attempt int4, fence_token int8, node uuid?, started_at timestamptz?, finished_at timestamptz, outcome text, error_kind text?, error text?, redriven_at timestamptz?, redriven_by text?, dead_reason text?
-- index: attempts_pkey (0003)
select
    tried.attempt, tried.fence_token, tried.node, tried.started_at, tried.finished_at, tried.outcome, tried.error_kind,
    case when $2 then tried.error end as error, tried.redriven_at, tried.redriven_by, tried.dead_reason
from rota.attempts as tried
where tried.job_id = $1
union all
-- Attempts are kept for a shorter time than dead letters, which know their last one.
select
    letter.attempt, letter.fence_token, letter.node, letter.started_at, letter.finished_at, letter.reason, letter.error_kind,
    case when $2 then letter.error end, null, null, null
from rota.dead_letters as letter
where letter.job_id = $1
  and letter.fence_token is not null
  and not exists (
      select from rota.attempts
      where attempts.job_id = letter.job_id
        and attempts.fence_token = letter.fence_token
  )
order by fence_token desc
