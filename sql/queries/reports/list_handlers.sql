-- List the handlers that were registered or paused, with the number of living nodes that have each.
-- If there are more than $1, those that are paused or that living nodes have take precedence.
--   $1 limit  int8  null: all
--   -> handler text, app text?, release text?, queue text?, max_attempts int4?, timeout interval?, delivery text?, seen_at timestamptz?, nodes int8?, paused bool, pause_reason text?, paused_by text?, paused_at timestamptz?, now timestamptz?, total int8?
--   total  number of handlers without the limit
with living_handlers as materialized (
    select name.handler, count(*) as nodes
    from rota.nodes as node
    cross join lateral (select distinct handler from unnest(node.handlers) as node_handler (handler)) as name
    where node.seen_at > now() - interval '15 seconds'
    group by name.handler
),
listed_handlers as (
    select
        handler.handler, handler.app, handler.release, handler.queue, handler.max_attempts, handler.timeout, handler.delivery,
        handler.seen_at, coalesce(living_handlers.nodes, 0) as nodes, handler.paused, handler.pause_reason, handler.paused_by,
        handler.paused_at, count(*) over () as total
    from rota.handlers as handler
    left join living_handlers on living_handlers.handler = handler.handler
    order by not (handler.paused or living_handlers.nodes is not null), handler.handler
    limit $1::int8
)
select
    handler.handler, handler.app, handler.release, handler.queue, handler.max_attempts, handler.timeout, handler.delivery,
    handler.seen_at, handler.nodes, handler.paused, handler.pause_reason, handler.paused_by, handler.paused_at, now() as now,
    handler.total
from listed_handlers as handler
order by handler.handler
