-- Hand due jobs to node $1, at most $3[i] into room $2[i] and $9 in all, most urgent first, stepping over rows that others are claiming.
--   $1 node_id          uuid
--   $2 rooms            text[]         the queues of this daemon that have free slots (* for those that share), and
--   $3 slots            int4[]         how many: the caller never asks for more than it can start
--   $4 lane_rooms       text[]         where to look: each lane is one queue, handler and priority …
--   $5 lane_queues      text[]
--   $6 lane_handlers    text[]
--   $7 lane_priorities  int2[]
--   $8 lane_floors      timestamptz[]  … from this run_at on: the last one claimed there, or -infinity to look at all
--   $9 total            int8
--   $10 suspects        int4           0: all jobs but suspects; 1: suspects alone (lost twice in a row)
--   $11 lease           interval       how long a claim holds without a heartbeat, where the job names no lease of its own
--   $12 known           text[]         the queues that the caller knows of, where it asks whether there are others; else null
--   -> job_id int8?, handler text?, queue text?, priority int2?, payload text?, attempt int4?, fence_token int8?, run_at timestamptz?, started_at timestamptz?, timeout interval?, schedule_id int8?, scheduled_for timestamptz?, created_at timestamptz?, lease interval?, idempotency_key text?, meta text?, checkpoint text?, schedule text?, next_in interval?, others bool?
-- At least one row comes back, for next_in, how long it is until the earliest future run_at of the lanes, and for others, whether
-- queues outside of $12 have scheduled jobs. Its job_id is null when nothing was claimed.
--   scheduled_for  null: as run_at
--   created_at     null: not later than run_at
--   lease          null: as $11
-- index: claim_due_jobs_idx (0002)
-- The lanes are probed one by one, because one scan over several handlers would step over all due jobs of the others.
-- Without the floor, every claim walks the dead index entries that earlier claims left at the front of the lane, which
-- a snapshot held by somebody keeps there. Rows are locked as the outer limit pulls them: no row beyond it is touched.
-- The update goes by ctid, which leaves the planner no other plan; a row that changed between snapshot and lock has
-- another ctid, is not updated, and is claimed next time.
with lane as materialized (
    select lane.room, lane.queue, lane.handler, lane.priority, head.run_at
    from unnest($4::text[], $5::text[], $6::text[], $7::int2[], $8::timestamptz[]) as lane (room, queue, handler, priority, floor)
    cross join lateral (
        select job.run_at
        from rota.jobs as job
        where job.state = 'scheduled'
          and job.queue = lane.queue
          and job.handler = lane.handler
          and (job.losses / 2) = $10
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
    select claimable.row_id
    from unnest($2::text[], $3::int4[]) as room (room, slots)
    cross join lateral (
        select locked.row_id
        from (
            select lane.queue, lane.handler, lane.priority, lane.run_at
            from lane
            where lane.room = room.room
              and lane.run_at <= now()
            order by lane.priority, lane.run_at
        ) as lane
        cross join lateral (
            select job.ctid as row_id
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue = lane.queue
              and job.handler = lane.handler
              and (job.losses / 2) = $10
              and job.priority = lane.priority
              and job.run_at >= lane.run_at
              and job.run_at <= now()
              and (job.start_by is null or job.start_by > now() or job.fence_token is not null)
            order by job.run_at
            limit room.slots
            for update skip locked
        ) as locked
        limit room.slots
    ) as claimable
    limit $9
),
claimed as (
    update rota.jobs as job
    set state = 'running',
        attempt = job.attempt + 1,
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
        job.job_id, job.handler, job.queue, job.priority, job.payload::text as payload, job.attempt, job.fence_token,
        job.run_at, job.started_at, job.timeout,
        -- Most jobs have none of these, and what is null costs neither side anything.
        job.schedule_id,
        nullif(job.scheduled_for, job.run_at) as scheduled_for,
        case when job.created_at > job.run_at then job.created_at end as created_at,
        nullif(job.lease, $11) as lease,
        job.idempotency_key, job.meta::text as meta, job.checkpoint::text as checkpoint,
        -- Of the two rows the fire is the one in memory: it was written with the job. It is kept for a limited time.
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
    claimed.job_id, claimed.handler, claimed.queue, claimed.priority, claimed.payload, claimed.attempt,
    claimed.fence_token, claimed.run_at, claimed.started_at, claimed.timeout,
    claimed.schedule_id, claimed.scheduled_for, claimed.created_at, claimed.lease, claimed.idempotency_key, claimed.meta,
    claimed.checkpoint, claimed.schedule,
    (select min(lane.run_at) from lane where lane.run_at > now()) - clock_timestamp() as next_in,
    -- One probe for each: what comes next after a queue that is known is known, too, or there is another.
    $12::text[] is not null and exists (
        select
        from unnest(array_prepend('', $12::text[])) as known (queue)
        cross join lateral (
            select job.queue
            from rota.jobs as job
            where job.state = 'scheduled'
              and job.queue > known.queue
            order by job.queue
            limit 1
        ) as following
        where following.queue <> all ($12::text[])
    ) as others
from (select) as always
left join claimed on true
