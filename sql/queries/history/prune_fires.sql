-- Forget fires whose instant lies longer ago than $1, and so does the decision, a batch at a time. Those that wait stay.
--   $1 keep   interval
--   $2 limit  int8
--   -> pruned int8?
-- index: fires_pkey (0005)
-- Without the look at decided_at, what was backfilled would be forgotten at once, and could be backfilled again.
-- By ctid: a join of the two, planned when there were few fires, compared each with each.
with old as materialized (
    select fire.ctid as row_id
    from rota.fires as fire
    where fire.scheduled_for < now() - $1::interval
      and fire.decided_at < now() - $1::interval
      and fire.disposition <> 'waiting'
    order by fire.scheduled_for
    limit $2
    for update skip locked
),
gone as (
    delete from rota.fires as fire
    where fire.ctid = any (array(select old.row_id from old))
    returning 1
)
select count(*) as pruned
from gone
