-- Write down attempts that did not succeed: the job waits for its next attempt, is buried, or is cancelled.
--   $1 job_ids       int8[]
--   $2 fence_tokens  int8[]
--   $3 leased_by     uuid[]         whose claims they are: this node's, or a dead one's
--   $4 settlements   text[]         retry | release (gives the attempt back) | bury | cancel
--   $5 delays        interval[]     until the next attempt …
--   $6 run_at        timestamptz[]  … or its instant; with neither, when the lease ends
--   $7 outcomes      text[]         what the attempt did
--   $8 reasons       text[]         why it is a dead letter, or was cancelled
--   $9 error_kinds   text[]
--   $10 errors       text[]
--   $11 expired      bool           write only where the lease has expired (reapers)
--   $12 alert        text           the handler that gets a job for each dead letter; null: none
--   -> job_id int8, fence_token int8, settlement text?
-- A request to cancel wins over retry, release and bury. History is written from what the fenced writes returned.
-- index: jobs_pkey (0002)
-- The writes go by job_id, not by ctid: between snapshot and lock a heartbeat may have moved the row.
with verdict as materialized (
    select *
    from unnest(
        $1::int8[], $2::int8[], $3::uuid[], $4::text[], $5::interval[], $6::timestamptz[], $7::text[], $8::text[], $9::text[],
        $10::text[]
    ) as verdict (job_id, fence_token, leased_by, settlement, delay, run_at, outcome, reason, error_kind, error)
    order by verdict.job_id
),
held as materialized (
    select verdict.*, request.requested_by, request.reason as request_reason,
        case when request.job_id is null then verdict.settlement else 'cancel' end as ruling
    from verdict
    cross join lateral (
        select jobs.job_id
        from rota.jobs
        where jobs.job_id = verdict.job_id
          and jobs.fence_token = verdict.fence_token
          and jobs.leased_by = verdict.leased_by
          and (not $11 or jobs.lease_expires_at < now())
        for update skip locked
    ) as job
    left join rota.cancel_requests as request on request.job_id = verdict.job_id
),
waiting as (
    update rota.jobs as job
    set state = 'scheduled',
        leased_by = null,
        lease_expires_at = null,
        progress = null,
        progress_note = null,
        run_at = coalesce(held.run_at, now() + held.delay, job.lease_expires_at),
        attempt = job.attempt - case held.ruling when 'release' then 1 else 0 end,
        releases = job.releases + case held.ruling when 'release' then 1 else 0 end,
        losses = case held.outcome when 'lost' then job.losses + 1 when 'snoozed' then 0 else job.losses end
    from held
    where job.job_id = any (array(select held.job_id from held where held.ruling in ('retry', 'release')))
      and held.job_id = job.job_id
    returning
        job.job_id, held.fence_token, held.ruling, held.leased_by as node, job.started_at,
        job.attempt + case held.ruling when 'release' then 1 else 0 end as attempt,
        job.attempt + job.releases > 20 as long_story,
        held.outcome, held.error_kind, held.error
),
ended as (
    delete from rota.jobs as job
    using held
    where job.job_id = any (array(select held.job_id from held where held.ruling in ('bury', 'cancel')))
      and held.job_id = job.job_id
    returning
        job.*, held.ruling, held.outcome, held.reason, held.error_kind, held.error, held.requested_by, held.request_reason
),
buried as (
    insert into rota.dead_letters (
        job_id, run_at, scheduled_for, created_at, fence_token, node, started_at, schedule_id, attempt, losses, releases,
        max_attempts, priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, retry_for,
        timeout, lease, unique_key, idempotency_key, meta, checkpoint, progress, progress_note, reason, error_kind, error
    )
    select
        ended.job_id, ended.run_at, ended.scheduled_for, ended.created_at, ended.fence_token, ended.leased_by, ended.started_at,
        ended.schedule_id, ended.attempt, ended.losses + case ended.outcome when 'lost' then 1 else 0 end, ended.releases,
        ended.max_attempts, ended.priority, ended.exclusive, ended.handler, ended.queue, ended.created_by, ended.payload,
        ended.delivery, ended.backoff_base, ended.backoff_cap, ended.retry_for, ended.timeout, ended.lease, ended.unique_key,
        ended.idempotency_key, ended.meta, ended.checkpoint, ended.progress, ended.progress_note, ended.reason,
        ended.error_kind, ended.error
    from ended
    where ended.ruling = 'bury'
),
alerted as (
    insert into rota.jobs (handler, payload)
    select
        $12,
        jsonb_build_object(
            'job_id', ended.job_id, 'handler', ended.handler, 'queue', ended.queue, 'reason', ended.reason,
            'error_kind', ended.error_kind, 'error', ended.error
        )
    from ended
    where ended.ruling = 'bury'
      and ended.handler <> $12
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome,
        handler, queue, unique_key, idempotency_key, meta, note
    )
    select
        ended.job_id, ended.schedule_id, ended.scheduled_for, ended.fence_token, ended.started_at, clock_timestamp(),
        ended.leased_by, ended.attempt, 'cancelled', ended.handler, ended.queue, ended.unique_key, ended.idempotency_key,
        ended.meta, coalesce('cancelled by ' || ended.requested_by || coalesce(': ' || ended.request_reason, ''), ended.reason)
    from ended
    where ended.ruling = 'cancel'
),
answered as (
    delete from rota.cancel_requests as request
    where request.job_id = any (array(select ended.job_id from ended))
),
remembered as (
    insert into rota.attempts (job_id, fence_token, attempt, node, started_at, outcome, error_kind, error)
    select waiting.job_id, waiting.fence_token, waiting.attempt, waiting.node, waiting.started_at, waiting.outcome,
        waiting.error_kind, waiting.error
    from waiting
    union all
    select ended.job_id, ended.fence_token, ended.attempt, ended.leased_by, ended.started_at, ended.outcome,
        ended.error_kind, ended.error
    from ended
    on conflict do nothing
),
forgotten as (
    delete from rota.attempts as old
    using waiting
    where waiting.long_story
      and old.job_id = waiting.job_id
      and old.fence_token <= (
          select kept.fence_token
          from rota.attempts as kept
          where kept.job_id = waiting.job_id
          order by kept.fence_token desc
          offset 19
          limit 1
      )
)
select waiting.job_id, waiting.fence_token, waiting.ruling as settlement
from waiting
union all
select ended.job_id, ended.fence_token, ended.ruling
from ended
