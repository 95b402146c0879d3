-- Find out whether attempts of node $1 were settled, after the answer to the settling statement was lost.
--   $1 node_id       uuid
--   $2 job_ids       int8[]
--   $3 fence_tokens  int8[]
--   -> fence_token int8?, finding text?
--   finding  settled: it was settled as succeeded, with this token; written: it was settled with another outcome;
--            free: the claim still exists, and nothing was written; held: the claim exists, but its row is locked, so ask again;
--            lost: none of these
-- index: jobs_pkey (0002), job_runs_job_id_idx, attempts_pkey (0003)
-- No EXISTS: for many attempts the planner would read the whole ledger into a hash table instead of probing its index.
-- The row lock distinguishes two cases: while a transaction is still committing, its row can't be locked; after a rollback it can.
select
    attempt.fence_token,
    case
        when unlocked.job_id is not null then 'free'
        when (
            select true
            from rota.jobs
            where jobs.job_id = attempt.job_id
              and jobs.fence_token = attempt.fence_token
              and jobs.leased_by = $1
        ) then 'held'
        when (
            select true
            from rota.job_runs
            where job_runs.job_id = attempt.job_id
              and job_runs.fence_token = attempt.fence_token
              and job_runs.node = $1
              and job_runs.outcome = 'succeeded'
            limit 1
        ) then 'settled'
        when (
            select true
            from rota.attempts
            where attempts.job_id = attempt.job_id
              and attempts.fence_token = attempt.fence_token
              and attempts.node = $1
              and attempts.outcome <> 'lost'
        ) then 'written'
        else 'lost'
    end as finding
from unnest($2::int8[], $3::int8[]) as attempt (job_id, fence_token)
left join lateral (
    select jobs.job_id
    from rota.jobs
    where jobs.job_id = attempt.job_id
      and jobs.fence_token = attempt.fence_token
      and jobs.leased_by = $1
    for update skip locked
) as unlocked on true
