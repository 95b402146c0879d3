-- Find limits that stop their jobs for long, limits of unknown handlers and queues, and keys with more running jobs than allowed.
--   $1 stopped_for  interval  report max_running = 0 after this time
--   $2 limit        int8      most rows of each kind
--   -> kind text?, key text?, applies text?, max_running int4?, running int8?, changed_at timestamptz?, note text?, last_start_at timestamptz?
--   kind  stopped: max_running is 0; unknown: no such handler or queue; over: more jobs run than max_running
-- index: limits_pkey, count_permits_idx (0012)
-- A lowered limit interrupts nothing, so `over` needs a job that started after the limit had changed: its claim counted all others.
-- The caller checks with was_limit_removed whether the limit of a pattern applies only since a limit with the exact key was removed.
with held as materialized (
    select name.key, count(*) as running, max(job.started_at) as last_start_at
    from rota.jobs as job
    cross join lateral unnest(array[job.limit_key, 'handler:' || job.handler, 'queue:' || job.queue]) as name (key)
    where job.leased_by is not null
      and name.key is not null
    group by name.key
)
(
    select 'stopped' as kind, limits.key, limits.key as applies, limits.max_running, 0::int8 as running, limits.changed_at, limits.note,
        null::timestamptz as last_start_at
    from rota.limits
    where limits.max_running = 0
      and limits.changed_at < now() - $1::interval
    order by limits.changed_at
    limit $2
)
union all
(
    select 'unknown', limits.key, limits.key, limits.max_running, 0, limits.changed_at, limits.note, null
    from rota.limits
    where right(limits.key, 1) <> '*'
      and (
          limits.key like 'handler:%'
          and substr(limits.key, length('handler:') + 1) not in (select handlers.handler from rota.handlers)
          or limits.key like 'queue:%'
          and substr(limits.key, length('queue:') + 1) not in (
              select node_queue.queue from rota.nodes cross join lateral unnest(nodes.queues) as node_queue (queue)
              union all
              select coalesce(handlers.queue, 'default') from rota.handlers
          )
          and not exists (select from rota.jobs where jobs.queue = substr(limits.key, length('queue:') + 1))
      )
    order by limits.key
    limit $2
)
union all
(
    select 'over', held.key, limits.key, limits.max_running, held.running, limits.changed_at, limits.note, held.last_start_at
    from held
    cross join lateral rota.limit_of(held.key) as limits
    where held.running > limits.max_running
      and held.last_start_at > limits.changed_at + interval '5 seconds'
    order by held.key
    limit $2
)
