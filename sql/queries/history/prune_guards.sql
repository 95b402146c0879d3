-- Delete a batch of guards that were not used for longer than $1.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: prune_guards_idx (0001)
-- Delete by the ctid of the locked row: a guard that is used meanwhile has another ctid and is kept.
with expired_guards as materialized (
    select guard.ctid as row_id
    from rota.guards as guard
    where guard.seen_at < now() - $1::interval
    order by guard.seen_at
    limit $2
    for update skip locked
),
deleted_guards as (
    delete from rota.guards as guard
    where guard.ctid = any (array(select expired_guards.row_id from expired_guards))
    returning 1
)
select count(*) as pruned
from deleted_guards
