-- List the attempts of a job that did not succeed, newest first.
--   $1 job_id       int8
--   $2 with_errors  bool  false: error is null
--   -> attempt int4, fence_token int8, node uuid?, started_at timestamptz?, finished_at timestamptz, outcome text, error_kind text?, error text?, redriven_at timestamptz?, redriven_by text?, dead_reason text?
-- index: attempts_pkey (0003)
select
    attempt.attempt, attempt.fence_token, attempt.node, attempt.started_at, attempt.finished_at, attempt.outcome,
    attempt.error_kind, case when $2 then attempt.error end as error, attempt.redriven_at, attempt.redriven_by,
    attempt.dead_reason
from rota.attempts as attempt
where attempt.job_id = $1
union all
-- The last attempt of a dead letter, if its row in rota.attempts was pruned before.
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
