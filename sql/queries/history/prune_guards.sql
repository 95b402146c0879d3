-- Forget guarded resources that nobody has touched for longer than $1, a batch at a time.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_guards_idx (0001)
-- The delete goes by the ctid of the row locked above it: one that is touched meanwhile has another, and stays.
with old as materialized (
    select guard.ctid as row_id
    from rota.guards as guard
    where guard.seen_at < now() - $1::interval
    order by guard.seen_at
    limit $2
    for update skip locked
),
gone as (
    delete from rota.guards as guard
    where guard.ctid = any (array(select old.row_id from old))
    returning 1
)
select count(*) as pruned
from gone
