-- Read the metrics about dead letters.
--   $1 most  int8  count only the newest ones
--   -> kind text?, queue text?, value float8?
--   kind  dead: number of dead letters of the queue; oldest_dead: age of the oldest one in seconds
-- index: prune_dead_letters_idx (0003)
-- The newest dead letters are counted, so that a queue with a new one is always included.
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
