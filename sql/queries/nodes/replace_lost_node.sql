-- Take node $1 itself from the lost ones, because it is back, or else one lost daemon of the same host and app, whose place it takes.
--   $1 node_id  uuid
--   $2 host     text
--   $3 app      text
--   $4 started  bool  it has started a moment ago; else only itself
--   -> replaced int8?
with back as (
    delete from rota.lost_nodes
    where node_id = $1
    returning 1
),
gone as (
    delete from rota.nodes as node
    where node.ctid = any (array(
        select silent.ctid
        from rota.nodes as silent
        where $4
          and silent.host = $2
          and silent.app = $3
          and silent.node_id <> $1
          and silent.seen_at < now() - interval '15 seconds'
        order by silent.seen_at desc
        limit 1
        for update skip locked
    ))
    returning 1
),
lost as (
    delete from rota.lost_nodes as node
    where node.ctid = any (array(
        select lost.ctid
        from rota.lost_nodes as lost
        where $4
          and lost.host = $2
          and lost.app = $3
          and lost.node_id <> $1
          and not exists (select from gone)
        order by lost.seen_at desc
        limit 1
        for update skip locked
    ))
    returning 1
)
select (select count(*) from back) + (select count(*) from gone) + (select count(*) from lost) as replaced
