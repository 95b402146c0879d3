-- Enter this daemon among the living, or say that it still is.
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
--   -> alive int8?           how many daemons are alive, this one included
with entered as (
    insert into rota.nodes as node (
        node_id, host, pid, rota_version, release, app, handlers, queues, slots, tzdata, state
    )
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11)
    on conflict (node_id) do update
    set seen_at = now(),
        state = excluded.state
    returning node.node_id
)
select count(*) + 1 as alive
from rota.nodes as node
where node.seen_at > now() - interval '15 seconds'
  and node.node_id not in (select entered.node_id from entered)
