-- Claim due jobs for one node: set them to running, give each a lease and a new fence token, and return what a handler needs.
-- The order is priority, then run_at. Rows that another transaction has locked are skipped.
-- At most $3[i] jobs are claimed in slot group $2[i], and at most $9 in all.
--   $1 node_id          uuid
--   $2 slot_groups      text[]         queues that have slots of their own on this node; * stands for all other queues together
--   $3 slots            int4[]         free slots of each slot group
--   $4 lane_groups      text[]         $4 to $8 are the lanes to search: the slot group of each lane,
--   $5 lane_queues      text[]         its queue,
--   $6 lane_handlers    text[]         its handler,
--   $7 lane_priorities  int2[]         its priority,
--   $8 lane_floors      timestamptz[]  and the run_at to start from (-infinity: the whole lane)
--   $9 total            int8
--   $10 suspects        int4           0: no suspects; 1: only suspects; 2: only suspects that must run alone; 3: only the other suspects
--   $11 lease           interval       for jobs whose lease column is null
--   $12 known           text[]         queues that the caller knows, for the column others; null: others is false
--   $13 only            int8[]         claim only these job_ids; null: all
--   $14 skipped         int8[]         never claim these job_ids; null: none
--   -> job_id int8?, handler text?, queue text?, priority int2?, payload text?, attempt int4?, fence_token int8?, run_at timestamptz?, started_at timestamptz?, timeout interval?, schedule_id int8?, scheduled_for timestamptz?, created_at timestamptz?, lease interval?, idempotency_key text?, meta text?, checkpoint text?, schedule text?, next_in interval?, others bool?, due_lanes int4[]?, due_from timestamptz[]?, ignored int8[]?, limited bool?
-- The last row is no job: only its last six columns are set. They are null in the other rows, which makes these cheap to send.
--   next_in        time until the earliest future run_at in the lanes
--   others         whether a queue outside of $12 has scheduled jobs
--   due_lanes      the numbers, from 1, of the lanes that had a due job before this claim, and
--   due_from       the run_at of the first due job of each (null: before the year 1000)
--   ignored        job_ids that were locked for this claim and yet not changed: a trigger dropped the change, or the row had just changed
--   limited        whether jobs are due that claim_limited_jobs claims: with a key, or of a handler or queue with a limit
--   scheduled_for  null: equal to run_at
--   created_at     null: before the year 1000 or after 8000
--   lease          null: equal to $11
--   payload        null: larger than 32 KiB. The executor reads it when the attempt starts (load_payload).
-- index: claim_due_jobs_idx (0002), claim_limited_jobs_idx, admit_waiting_jobs_idx (0012)
-- Each lane is probed on its own: one scan over several handlers would read all due jobs of the other handlers.
-- The floor skips dead index entries. Earlier claims leave them at the front of a lane, and an old snapshot keeps them there.
-- The outer limit ends the scan, so that no row beyond it is locked.
-- The update goes by ctid, which leaves the planner one plan. A row that changed between snapshot and lock has another ctid:
-- it is not updated, and the next claim finds it.
-- A suspect is a job that lost two leases in a row. Suspects claimed together ($10 = 3) get one loss subtracted: if the worker
-- dies, any of them may be the cause, so this loss must not bury the job. A suspect runs alone on its last attempt, and after it
-- was lost together with others: its history then shows more than two losses (or none, if it was pruned).
with shared_limit as materialized (
    select limits.key from rota.limits where limits.key like 'handler:%'
    union all
    select limits.key from rota.limits where limits.key like 'queue:%'
    union all
    select hold.key from rota.limit_holds as hold where hold.key like 'handler:%'
    union all
    select hold.key from rota.limit_holds as hold where hold.key like 'queue:%'
),
lane as materialized (
    select lane.slot_group, lane.queue, lane.handler, lane.priority, lane.number::int4 as number, head.run_at,
        exists (
            select
            from shared_limit
            where shared_limit.key in ('handler:' || lane.handler, 'queue:' || lane.queue)
               or right(shared_limit.key, 1) = '*' and (
                   starts_with('handler:' || lane.handler, left(shared_limit.key, -1))
                   or starts_with('queue:' || lane.queue, left(shared_limit.key, -1))
               )
        ) as is_limited
    from unnest($4::text[], $5::text[], $6::text[], $7::int2[], $8::timestamptz[])
        with ordinality as lane (slot_group, queue, handler, priority, floor, number)
    cross join lateral (
        select job.run_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
          and (job.losses / 2) = least($10, 1)
          and job.priority = lane.priority
          and job.run_at >= lane.floor
        order by job.run_at
        limit 1
    ) as head
    where lane.handler <> all (select handler from rota.handlers where paused)
      and lane.queue <> all (select queue from rota.queues where paused)
      and not exists (select from rota.queues where queue = '*' and paused)
),
due as materialized (
    select group_jobs.row_id, group_jobs.job_id
    from unnest($2::text[], $3::int4[]) as slot_group (slot_group, slots)
    cross join lateral (
        select locked.row_id, locked.job_id
        from (
            select lane.queue, lane.handler, lane.priority, lane.run_at
            from lane
            where lane.slot_group = slot_group.slot_group
              and lane.run_at <= now()
              and not lane.is_limited
            order by lane.priority, lane.run_at
        ) as lane
        cross join lateral (
            select job.ctid as row_id, job.job_id
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = lane.queue
              and job.handler = lane.handler
              and (job.losses / 2) = least($10, 1)
              and job.priority = lane.priority
              and job.run_at >= lane.run_at
              and job.run_at <= now()
              and (job.start_by is null or job.start_by > now() or job.fence_token is not null)
              and ($13::int8[] is null or job.job_id = any ($13))
              and ($14::int8[] is null or job.job_id <> all ($14))
              and ($10 < 2 or ($10 = 2) = (
                  job.attempt + 1 >= coalesce(job.max_attempts, 20)
                  or (
                      select count(*)
                      from rota.attempts as lost
                      where lost.job_id = job.job_id
                        and lost.outcome = 'lost'
                  ) not in (0, 2)
              ))
            order by job.run_at
            limit slot_group.slots
            for update skip locked
        ) as locked
        limit slot_group.slots
    ) as group_jobs
    limit $9
),
claimed as (
    update rota.jobs as job
    set state = 'running',
        attempt = job.attempt + 1,
        losses = job.losses - case $10 when 3 then 1 else 0 end,
        fence_token = nextval('rota.fence_tokens'),
        leased_by = $1,
        lease_expires_at = clock_timestamp() + coalesce(job.lease, $11),
        started_at = clock_timestamp(),
        delivery = coalesce(job.delivery, handler.delivery, 'at_least_once'),
        max_attempts = case coalesce(job.delivery, handler.delivery)
            when 'at_most_once' then 1
            else coalesce(job.max_attempts, handler.max_attempts, 20)
        end,
        backoff_base = coalesce(job.backoff_base, handler.backoff_base, interval '5 seconds'),
        backoff_cap = coalesce(job.backoff_cap, handler.backoff_cap, interval '1 hour'),
        timeout = coalesce(job.timeout, handler.timeout),
        lease = coalesce(job.lease, $11)
    from rota.handlers as handler
    where job.ctid = any (array(select row_id from due))
      and handler.handler = job.handler
    returning
        job.job_id, job.handler, job.queue, job.priority,
        -- A compressed payload may be a hundred times as large as its stored form, so its size is taken after decompression.
        case
            when pg_column_size(job.payload) <= 32768
                and (pg_column_compression(job.payload) is null or pg_column_size(job.payload #> '{}') <= 32768)
            then job.payload::text
        end as payload,
        job.attempt, job.fence_token,
        -- Clamped: the driver would reject the whole batch for one instant that Python can't represent.
        greatest(job.run_at, timestamptz '1000-01-01 00:00+00') as run_at, job.started_at, job.timeout,
        -- Null for most jobs, because a null is cheap to send and to decode.
        job.schedule_id,
        case when job.scheduled_for between timestamptz '1000-01-01 00:00+00' and timestamptz '8000-01-01 00:00+00'
            then nullif(job.scheduled_for, job.run_at) end as scheduled_for,
        case when job.created_at between timestamptz '1000-01-01 00:00+00' and timestamptz '8000-01-01 00:00+00'
            then job.created_at end as created_at,
        nullif(job.lease, $11) as lease,
        job.idempotency_key, job.meta::text as meta, job.checkpoint::text as checkpoint,
        -- The name comes from the fire, whose page is likely to be cached. Old fires are pruned: then it comes from the definition.
        case when job.schedule_id is not null then coalesce(
            (
                select fire.name
                from rota.fires as fire
                where fire.scheduled_for = job.scheduled_for
                  and fire.schedule_id = job.schedule_id
            ),
            (
                select definition.name
                from rota.schedule_definitions as definition
                where definition.schedule_id = job.schedule_id
            )
        ) end as schedule
)
select
    claimed.job_id, claimed.handler, claimed.queue, claimed.priority,
    -- Checked again as text: a number may have many more digits than bytes.
    case when octet_length(claimed.payload) <= 32768 then claimed.payload end as payload, claimed.attempt,
    claimed.fence_token, claimed.run_at, claimed.started_at, claimed.timeout,
    claimed.schedule_id, claimed.scheduled_for, claimed.created_at, claimed.lease, claimed.idempotency_key, claimed.meta,
    claimed.checkpoint, claimed.schedule, null::interval as next_in, null::bool as others, null::int4[] as due_lanes,
    null::timestamptz[] as due_from, null::int8[] as ignored, null::bool as limited
from claimed
union all
select
    null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
    least(
        (select min(lane.run_at) from lane where lane.run_at > now() and lane.run_at < 'infinity'),
        (select waiting.run_at from rota.jobs as waiting where waiting.state = 'waiting' order by waiting.run_at limit 1)
    ) - clock_timestamp(),
    -- One probe per known queue finds the next queue in the index. An unknown one means that there are others.
    $12::text[] is not null and exists (
        select
        from unnest(array_prepend('', $12::text[])) as known_queue (queue)
        cross join lateral (
            select job.queue
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue > known_queue.queue
            order by job.queue
            limit 1
        ) as next_queue
        where next_queue.queue <> all ($12::text[])
    ),
    array(select lane.number from lane where lane.run_at <= now() order by lane.number),
    array(
        select case when lane.run_at >= timestamptz '1000-01-01 00:00+00' then lane.run_at end
        from lane
        where lane.run_at <= now()
        order by lane.number
    ),
    case
        when (select count(*) from due) > (select count(*) from claimed)
        then array(select due.job_id from due where due.job_id not in (select claimed.job_id from claimed))
    end,
    exists (select from rota.jobs as keyed where keyed.state = 'limited')
    or exists (select from rota.jobs as waiting where waiting.state = 'waiting' and waiting.run_at <= now())
    or exists (select from lane where lane.is_limited and lane.run_at <= now())
