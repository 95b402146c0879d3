-- Enter this daemon among the living, or say that it still is; when it is on its way out, tell the others at once.
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
--   $12 shards       int4[]  whose schedules it looks at
--   $13 refused      text    JSON array: rows with which the database refuses its operations; null: none
--   -> living uuid[]?, known int8?, told int8?
--   living  the daemons that are alive and not draining; this one included, unless it is
--   known   how many of its handlers have rows: without one, no job of it can be claimed
with entered as (
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
told as (
    select rota.tell('rota_wake', 'nodes')
    from entered
    where entered.state = 'draining'
)
select
    array(
        select node.node_id
        from rota.nodes as node
        where node.seen_at > now() - interval '15 seconds'
          and node.state = 'running'
          and node.node_id not in (select entered.node_id from entered)
        union all
        select entered.node_id
        from entered
        where entered.state = 'running'
    ) as living,
    (select count(*) from rota.handlers as handler where handler.handler = any ($7)) as known,
    (select count(*) from told) as told
