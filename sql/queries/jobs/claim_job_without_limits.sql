-- Claim the first due job of some handlers, whatever its queue and limits. Only rota.testing uses this.
--   $1 node_id   uuid
--   $2 handlers  text[]
--   $3 lease     interval
--   -> job_id int8?, handler text?, queue text?, priority int2?, payload text?, attempt int4?, fence_token int8?, run_at timestamptz?, started_at timestamptz?, timeout interval?, schedule_id int8?, scheduled_for timestamptz?, created_at timestamptz?, lease interval?, idempotency_key text?, meta text?, checkpoint text?, schedule text?, limit_key text?, is_limited bool?
-- index: jobs_pkey (0002)
with due as materialized (
    select job.job_id
    from rota.jobs as job
    where job.state <> 'running'
      and job.run_at <= now()
      and job.handler = any ($2)
      and job.handler <> all (select handlers.handler from rota.handlers where handlers.paused)
      and not exists (select from rota.queues where queues.paused and queues.queue in (job.queue, '*'))
      and (job.start_by is null or job.start_by > now() or job.fence_token is not null)
    order by job.losses / 2, job.priority, job.run_at, job.job_id
    limit 1
    for update skip locked
)
update rota.jobs as job
set state = 'running',
    attempt = job.attempt + 1,
    fence_token = nextval('rota.fence_tokens'),
    leased_by = $1,
    lease_expires_at = clock_timestamp() + coalesce(job.lease, $3),
    started_at = clock_timestamp(),
    delivery = coalesce(job.delivery, handler.delivery, 'at_least_once'),
    max_attempts = case coalesce(job.delivery, handler.delivery)
        when 'at_most_once' then 1
        else coalesce(job.max_attempts, handler.max_attempts, 20)
    end,
    backoff_base = coalesce(job.backoff_base, handler.backoff_base, interval '5 seconds'),
    backoff_cap = coalesce(job.backoff_cap, handler.backoff_cap, interval '1 hour'),
    timeout = coalesce(job.timeout, handler.timeout),
    lease = coalesce(job.lease, $3)
from rota.handlers as handler
where job.job_id in (select due.job_id from due)
  and handler.handler = job.handler
returning
    job.job_id, job.handler, job.queue, job.priority, job.payload::text as payload, job.attempt, job.fence_token, job.run_at,
    job.started_at, job.timeout, job.schedule_id, job.scheduled_for, job.created_at, nullif(job.lease, $3) as lease,
    job.idempotency_key, job.meta::text as meta, job.checkpoint::text as checkpoint,
    (
        select definition.name
        from rota.schedule_definitions as definition
        where definition.schedule_id = job.schedule_id
    ) as schedule,
    job.limit_key, job.limit_key is not null as is_limited
