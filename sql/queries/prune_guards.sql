-- Forget guarded resources that nobody has touched for longer than $1, a batch at a time.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
with old as materialized (
    select guard.resource
    from rota.guards as guard
    where guard.seen_at < now() - $1::interval
    limit $2
    for update skip locked
),
gone as (
    delete from rota.guards as guard
    using old
    where guard.resource = old.resource
    returning 1
)
select count(*) as pruned
from gone
