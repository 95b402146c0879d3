-- List the attempts of a job that did not succeed, newest first; their error texts only if $2.
--   $1 job_id       int8
--   $2 with_errors  bool
--   -> attempt int4, fence_token int8, node uuid?, started_at timestamptz?, finished_at timestamptz, outcome text, error_kind text?, error text?
-- index: attempts_pkey (0003)
select
    tried.attempt, tried.fence_token, tried.node, tried.started_at, tried.finished_at, tried.outcome, tried.error_kind,
    case when $2 then tried.error end as error
from rota.attempts as tried
where tried.job_id = $1
order by tried.fence_token desc
