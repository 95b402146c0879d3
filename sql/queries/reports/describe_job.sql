-- Return the state and settings of a job, whether live, finished or a dead letter; no row if the id is unknown.
--   $1 job_id  int8
--   -> job_id int8?, handler text?, queue text?, state text?, priority int2?, run_at timestamptz?, scheduled_for timestamptz?, attempt int4?, max_attempts int4?, losses int4?, releases int4?, delivery text?, backoff_base interval?, backoff_cap interval?, retry_for interval?, timeout interval?, start_by timestamptz?, unique_key text?, schedule_id int8?, created_at timestamptz?, created_by text?, started_at timestamptz?, finished_at timestamptz?, node uuid?, fence_token int8?, lease_expires_at timestamptz?, cancel_requested bool?, follow_up bool?, last_error_kind text?, progress float4?, progress_note text?, note text?, limit_key text?, paused bool?, now timestamptz?
-- index: jobs_pkey (0002), dead_letters_pkey, job_runs_job_id_idx (0003)
-- Settings that are null in the job's row are taken from rota.handlers, as the next claim will do.
select
    status.job_id, status.handler, status.queue, status.state, status.priority, status.run_at, status.scheduled_for,
    status.attempt,
    case coalesce(live.delivery, letter.delivery, handler.delivery)
        when 'at_most_once' then 1
        else coalesce(status.max_attempts, handler.max_attempts, 20)
    end as max_attempts,
    coalesce(live.losses, letter.losses) as losses,
    coalesce(live.releases, letter.releases) as releases,
    coalesce(live.delivery, letter.delivery, handler.delivery, 'at_least_once') as delivery,
    coalesce(live.backoff_base, letter.backoff_base, handler.backoff_base, interval '5 seconds') as backoff_base,
    coalesce(live.backoff_cap, letter.backoff_cap, handler.backoff_cap, interval '1 hour') as backoff_cap,
    coalesce(live.retry_for, letter.retry_for) as retry_for,
    coalesce(live.timeout, letter.timeout, handler.timeout) as timeout,
    live.start_by,
    status.unique_key, status.schedule_id, status.created_at, status.created_by, status.started_at, status.finished_at,
    status.node, status.fence_token, status.lease_expires_at, status.cancel_requested, live.follow_up is not null as follow_up,
    status.last_error_kind,
    status.progress, status.progress_note, status.note, status.limit_key,
    coalesce(handler.paused, false)
        or exists (select from rota.queues where queues.paused and queues.queue in (status.queue, '*')) as paused,
    now() as now
from rota.job_status as status
left join rota.jobs as live on live.job_id = status.job_id
left join rota.dead_letters as letter on letter.job_id = status.job_id
left join rota.handlers as handler on handler.handler = status.handler
where status.job_id = $1
limit 1
