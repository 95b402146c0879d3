-- Sample the dead letters for the gauges: kind 'dead' (queue; the newest $1 are counted) and 'oldest_dead' (seconds, exact).
--   $1 most  int8
--   -> kind text?, queue text?, value float8?
-- index: prune_dead_letters_idx (0003)
-- Live jobs are sampled by summarise_live_jobs. The newest come first, so that a queue with a new dead letter is never left out.
with letter as materialized (
    select dead.queue
    from rota.dead_letters as dead
    order by dead.finished_at desc
    limit $1
)
select 'dead' as kind, letter.queue, count(*)::float8 as value
from letter
group by letter.queue
union all
select
    'oldest_dead', null,
    case when oldest.finished_at is null then 0 else extract(epoch from now()) - extract(epoch from oldest.finished_at) end::float8
from (select min(finished_at) as finished_at from rota.dead_letters) as oldest
