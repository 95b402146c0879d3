-- Return the limits that apply to some keys, and what the keys have used of them.
--   $1 keys     text[]  limit_keys of jobs, handler:NAME or queue:NAME
--   $2 holders  int4    return the ids of at most this many running jobs of each key
--   -> key text?, applies text?, max_running int4?, max_starts int4?, per interval?, weight int4?, note text?, declared_by text?, changed_at timestamptz?, held_until timestamptz?, hold_reason text?, running int8?, holders int8[]?, starts_left int4?, next_start_at timestamptz?, now timestamptz?
--   applies        the key of the limit: the same, or one that ends in *; null: none
--   held_until     null unless the key is held now
--   starts_left    null without max_starts
--   next_start_at  when the next start is possible; null unless starts_left is 0
-- index: limits_pkey, limit_holds_pkey, limit_starts_pkey, count_permits_idx (0012)
select
    asked.key, limits.key as applies, limits.max_running, limits.max_starts, limits.per, limits.weight, limits.note,
    limits.declared_by, limits.changed_at, held.until as held_until,
    case when held.until = hold.held_until then hold.reason when held.until is not null then limits.hold_reason end as hold_reason,
    holder.jobs as running, holder.job_ids[:$2] as holders, starts.free as starts_left,
    case when starts.free <= 0 then starts.reopens_at end as next_start_at, clock_timestamp() as now
from unnest($1::text[]) with ordinality as asked (key, number)
left join lateral rota.limit_of(asked.key) as limits on true
left join rota.limit_holds as hold on hold.key = asked.key
left join lateral (
    select greatest(limits.held_until, hold.held_until) as until
    where greatest(limits.held_until, hold.held_until) > clock_timestamp()
) as held on true
cross join lateral (
    select count(*) as jobs, coalesce(array_agg(job.job_id order by job.job_id), '{}') as job_ids
    from (
        select own.job_id
        from rota.jobs as own
        where own.leased_by is not null
          and own.limit_key = asked.key
        union all
        select running.job_id
        from rota.jobs as running
        where running.state = 'running'
          and (asked.key like 'handler:%' or asked.key like 'queue:%')
          and asked.key in ('handler:' || running.handler, 'queue:' || running.queue)
    ) as job
) as holder
left join lateral rota.starts_left(asked.key, limits.max_starts, limits.per, clock_timestamp(), limits.max_starts) as starts on true
order by asked.number
