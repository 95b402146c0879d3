-- List the handlers that daemons have registered or people have paused, with the number of living daemons that have them.
--   -> handler text, app text?, release text?, queue text?, max_attempts int4?, timeout interval?, delivery text?, seen_at timestamptz?, nodes int8, paused bool, pause_reason text?, paused_by text?, paused_at timestamptz?, now timestamptz?
select
    handler.handler, handler.app, handler.release, handler.queue, handler.max_attempts, handler.timeout, handler.delivery,
    handler.seen_at,
    (
        select count(*)
        from rota.nodes as node
        where node.seen_at > now() - interval '15 seconds'
          and handler.handler = any (node.handlers)
    ) as nodes,
    handler.paused, handler.pause_reason, handler.paused_by, handler.paused_at, now() as now
from rota.handlers as handler
order by handler.handler
