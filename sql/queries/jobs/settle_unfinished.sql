-- Settle attempts that did not succeed: the job is retried, released, buried (becomes a dead letter) or cancelled.
-- An attempt is settled only if the claim still has this fence token and owner. Locked rows are skipped.
-- If there is a request to cancel the job, it is cancelled, whatever $4 says.
--   $1 job_ids       int8[]
--   $2 fence_tokens  int8[]
--   $3 leased_by     uuid[]         node that made the claim: this one, or one whose lease has expired
--   $4 settlements   text[]         retry | release (does not count as an attempt) | bury | cancel
--   $5 delays        interval[]     how long to wait before the next attempt
--   $6 run_at        timestamptz[]  when to run it; wins over the delay. If both are null, it runs when the lease expires
--   $7 outcomes      text[]         outcome of the attempt
--   $8 reasons       text[]         reason of the dead letter, or of the cancellation
--   $9 error_kinds   text[]
--   $10 errors       text[]
--   $11 expired      bool           settle only if the lease has expired (for reapers)
--   $12 alert        text           handler to enqueue a job for each dead letter; null: none
--   -> job_id int8, fence_token int8, settlement text?
--   settlement  what was done: the requested settlement, or cancel
-- index: jobs_pkey (0002)
-- History is written from what the update and the delete returned. Both go by job_id, not by ctid: a heartbeat may have moved the
-- row between snapshot and lock. The last 20 attempts of a job are kept.
with requested as materialized (
    select *
    from unnest(
        $1::int8[], $2::int8[], $3::uuid[], $4::text[], $5::interval[], $6::timestamptz[], $7::text[], $8::text[], $9::text[],
        $10::text[]
    ) as requested (job_id, fence_token, leased_by, settlement, delay, run_at, outcome, reason, error_kind, error)
    order by requested.job_id
),
locked as materialized (
    select requested.*, request.requested_by, request.reason as request_reason,
        case when request.job_id is null then requested.settlement else 'cancel' end as final_settlement
    from requested
    cross join lateral (
        select jobs.job_id
        from rota.jobs
        where jobs.job_id = requested.job_id
          and jobs.fence_token = requested.fence_token
          and jobs.leased_by = requested.leased_by
          and (not $11 or jobs.lease_expires_at < now())
        for update skip locked
    ) as job
    left join rota.cancel_requests as request on request.job_id = requested.job_id
),
rescheduled as (
    update rota.jobs as job
    set state = 'scheduled',
        leased_by = null, lease_expires_at = null, progress = null, progress_note = null,
        run_at = coalesce(locked.run_at, now() + locked.delay, job.lease_expires_at),
        attempt = job.attempt - case locked.final_settlement when 'release' then 1 else 0 end,
        releases = job.releases + case locked.final_settlement when 'release' then 1 else 0 end,
        losses = case locked.outcome when 'lost' then job.losses + 1 when 'snoozed' then 0 when 'held' then 0 else job.losses end
    from locked
    where job.job_id = any (array(select locked.job_id from locked where locked.final_settlement in ('retry', 'release')))
      and locked.job_id = job.job_id
    returning
        job.job_id, locked.fence_token, locked.final_settlement, locked.leased_by as node, job.started_at,
        job.attempt + case locked.final_settlement when 'release' then 1 else 0 end as attempt,
        job.attempt + job.releases > 20 as over_attempt_limit, locked.outcome, locked.error_kind, locked.error
),
deleted as (
    delete from rota.jobs as job
    using locked
    where job.job_id = any (array(select locked.job_id from locked where locked.final_settlement in ('bury', 'cancel')))
      and locked.job_id = job.job_id
    returning
        job.*, locked.final_settlement, locked.outcome, locked.reason, locked.error_kind, locked.error, locked.requested_by,
        locked.request_reason
),
buried as (
    insert into rota.dead_letters (
        job_id, run_at, scheduled_for, created_at, fence_token, node, started_at, schedule_id, attempt, losses, releases,
        max_attempts, priority, exclusive, handler, queue, created_by, payload, delivery, backoff_base, backoff_cap, retry_for,
        timeout, lease, unique_key, idempotency_key, meta, checkpoint, progress, progress_note, limit_key, reason, error_kind, error
    )
    select
        deleted.job_id, deleted.run_at, deleted.scheduled_for, deleted.created_at, deleted.fence_token, deleted.leased_by,
        deleted.started_at, deleted.schedule_id, deleted.attempt,
        deleted.losses + case deleted.outcome when 'lost' then 1 else 0 end, deleted.releases, deleted.max_attempts,
        deleted.priority, deleted.exclusive, deleted.handler, deleted.queue, deleted.created_by, deleted.payload,
        deleted.delivery, deleted.backoff_base, deleted.backoff_cap, deleted.retry_for, deleted.timeout, deleted.lease,
        deleted.unique_key, deleted.idempotency_key, deleted.meta, deleted.checkpoint, deleted.progress, deleted.progress_note, deleted.limit_key,
        deleted.reason, deleted.error_kind, deleted.error
    from deleted
    where deleted.final_settlement = 'bury'
),
alert_enqueued as (
    insert into rota.jobs (handler, payload)
    select
        $12,
        jsonb_build_object(
            'job_id', deleted.job_id, 'handler', deleted.handler, 'queue', deleted.queue, 'reason', deleted.reason,
            'error_kind', deleted.error_kind, 'error', deleted.error
        )
    from deleted
    where deleted.final_settlement = 'bury'
      and deleted.handler <> $12
),
recorded as (
    insert into rota.job_runs (
        job_id, schedule_id, scheduled_for, fence_token, started_at, finished_at, node, attempts, outcome, handler, queue,
        unique_key, idempotency_key, meta, note
    )
    select
        deleted.job_id, deleted.schedule_id, deleted.scheduled_for, deleted.fence_token, deleted.started_at, clock_timestamp(),
        deleted.leased_by, deleted.attempt, 'cancelled', deleted.handler, deleted.queue, deleted.unique_key,
        deleted.idempotency_key, deleted.meta,
        coalesce('cancelled by ' || deleted.requested_by || coalesce(': ' || deleted.request_reason, ''), deleted.reason)
    from deleted
    where deleted.final_settlement = 'cancel'
),
cancel_requests_deleted as (
    delete from rota.cancel_requests as request
    where request.job_id = any (array(select deleted.job_id from deleted))
),
attempts_recorded as (
    insert into rota.attempts (job_id, fence_token, attempt, node, started_at, outcome, error_kind, error)
    select rescheduled.job_id, rescheduled.fence_token, rescheduled.attempt, rescheduled.node, rescheduled.started_at,
        rescheduled.outcome,
        rescheduled.error_kind, rescheduled.error
    from rescheduled
    union all
    select deleted.job_id, deleted.fence_token, deleted.attempt, deleted.leased_by, deleted.started_at, deleted.outcome,
        deleted.error_kind, deleted.error
    from deleted
    on conflict do nothing
),
attempts_pruned as (
    delete from rota.attempts as excess
    using rescheduled
    where rescheduled.over_attempt_limit
      and excess.job_id = rescheduled.job_id
      and excess.fence_token <= (
          select kept.fence_token
          from rota.attempts as kept
          where kept.job_id = rescheduled.job_id
          order by kept.fence_token desc
          offset 19
          limit 1
      )
)
select rescheduled.job_id, rescheduled.fence_token, rescheduled.final_settlement as settlement
from rescheduled
union all
select deleted.job_id, deleted.fence_token, deleted.final_settlement
from deleted
