-- Insert this node, or update when it was last seen. A draining node also notifies the others, which take over its shards.
--   $1 node_id       uuid
--   $2 host          text
--   $3 pid           int4
--   $4 rota_version  text
--   $5 release       text
--   $6 app           text
--   $7 handlers      text[]
--   $8 queues        text[]
--   $9 slots         text    JSON object: queue -> slots
--   $10 tzdata       text
--   $11 state        text
--   $12 shards       int4[]  shards of schedules that the node handles
--   $13 refused      text    JSON array of rows that the database rejects; null: none
--   -> living uuid[]?, known int8?, notified int8?
--   living  nodes that are alive and running; this one only if it is not draining
--   known   number of its handlers with a row in rota.handlers; jobs of handlers without a row can't be claimed
with this_node as (
    insert into rota.nodes as node (
        node_id, host, pid, rota_version, release, app, handlers, queues, slots, tzdata, state, shards, refused
    )
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11, $12::int4[], $13::text::jsonb)
    on conflict (node_id) do update
    set seen_at = now(),
        state = excluded.state,
        shards = excluded.shards,
        refused = excluded.refused
    returning node.node_id, node.state
),
notified as (
    select rota.tell('rota_wake', 'nodes')
    from this_node
    where this_node.state = 'draining'
)
select
    array(
        select node.node_id
        from rota.nodes as node
        where node.seen_at > now() - interval '15 seconds'
          and node.state = 'running'
          and node.node_id not in (select this_node.node_id from this_node)
        union all
        select this_node.node_id
        from this_node
        where this_node.state = 'running'
    ) as living,
    (select count(*) from rota.handlers as handler where handler.handler = any ($7)) as known,
    (select count(*) from notified) as notified
