-- Claim due jobs that have a key, or whose handler or queue has a limit. Jobs without a key take turns with them.
-- The order is priority, then turns: each key of a queue and priority starts at most `weight` jobs, then the next key is visited.
-- Locks and permits are explained in docs/design.md.
--   $1 node_id             uuid
--   $2 slot_groups         text[]         as in claim_due_jobs, and also groups without a free slot
--   $3 slots               int4[]         free slots of each slot group
--   $4 own_queues          text[]         queues that have slots of their own on this node; the others belong to the group *
--   $5 handlers            text[]         handlers of this node
--   $6 lane_queues         text[]         $6 to $9 are the lanes to search for jobs without a key: queue,
--   $7 lane_handlers       text[]         handler,
--   $8 lane_priorities     int2[]         priority,
--   $9 lane_floors         timestamptz[]  and the run_at to start from
--   $10 cursor_groups      text[]         $10 to $14 are the cursors: slot group,
--   $11 cursor_priorities  int2[]         priority,
--   $12 cursor_queues      text[]         queue and
--   $13 cursor_keys        text[]         key of the last job that was started there (empty: a job without a key),
--   $14 cursor_left        int4[]         and how many more jobs of that key may start in the same turn
--   $15 resume_priorities  int2[]         $15 to $18: where to resume the round of each slot group, from `walked_…` of the last claim;
--   $16 resume_parts       int4[]         null: begin a round
--   $17 resume_queues      text[]
--   $18 resume_keys        text[]
--   $19 suspects           int4           as in claim_due_jobs
--   $20 total              int8
--   $21 lease              interval       for jobs whose lease column is null
--   $22 only               int8[]         claim only these job_ids; null: all
--   $23 skipped            int8[]         never claim these job_ids; null: none
--   $24 dry_run            bool           return job_id, handler, queue, priority and schedule_id of the jobs, and claim nothing
--   -> job_id int8?, handler text?, queue text?, priority int2?, payload text?, attempt int4?, fence_token int8?, run_at timestamptz?, started_at timestamptz?, timeout interval?, schedule_id int8?, scheduled_for timestamptz?, created_at timestamptz?, lease interval?, idempotency_key text?, meta text?, checkpoint text?, schedule text?, limit_key text?, is_limited bool?, turn int4?, weight int4?, next_in interval?, is_contended bool?, ignored int8[]?, round_complete bool[]?, walked_priorities int2[]?, walked_parts int4[]?, walked_queues text[]?, walked_keys text[]?
-- The last row is no job: only its last eight columns are set. The first eighteen columns are those of claim_due_jobs.
--   is_limited    whether the job has a key, or its handler or queue has a limit
--   turn          the order in which the jobs were chosen
--   weight        of the job's key
--   next_in       time until the earliest instant that is known now at which a job may start: a run_at, the end of a hold or interval
--   is_contended  whether another session had an open key locked
--   ignored       as in claim_due_jobs
--   round_complete  for each slot group: true if the walk has seen all keys, false if it stopped, because enough open keys were found
--                 or after 300 keys
--   walked_…      for each slot group: where the walk stopped after 300 keys; else null
-- index: claim_due_jobs_idx (0002), claim_limited_jobs_idx, admit_waiting_jobs_idx, count_permits_idx (0012)
select
    claim.job_id, claim.handler, claim.queue, claim.priority,
    case when octet_length(claim.payload) <= 32768 then claim.payload end as payload, claim.attempt, claim.fence_token,
    claim.run_at, claim.started_at, claim.timeout, claim.schedule_id, claim.scheduled_for, claim.created_at, claim.lease,
    claim.idempotency_key, claim.meta, claim.checkpoint, claim.schedule, claim.limit_key, claim.is_limited, claim.turn,
    claim.weight, claim.next_in, claim.is_contended, claim.ignored, claim.round_complete, claim.walked_priorities,
    claim.walked_parts, claim.walked_queues, claim.walked_keys
from rota.claim_limited_jobs(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24
) as claim
