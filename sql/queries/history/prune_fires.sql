-- Delete a batch of fires whose instant and decision are both older than $1. Waiting fires are kept.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: fires_pkey (0005)
-- Without the condition on decided_at, the fire of a backfilled instant would be deleted at once, and the instant could be
-- backfilled again. Delete by ctid: the planner expects few fires, and would join all of them in a nested loop.
with expired_fires as materialized (
    select fire.ctid as row_id
    from rota.fires as fire
    where fire.scheduled_for < now() - $1::interval
      and fire.decided_at < now() - $1::interval
      and fire.disposition <> 'waiting'
    order by fire.scheduled_for
    limit $2
    for update skip locked
),
deleted_fires as (
    delete from rota.fires as fire
    where fire.ctid = any (array(select expired_fires.row_id from expired_fires))
    returning 1
)
select count(*) as pruned
from deleted_fires
